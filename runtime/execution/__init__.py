"""The parts of the model: one Protocol each, and what runs behind it."""
