"""The parts of the model in operations that exporters have; in float32 equal to the libraries' modules."""
