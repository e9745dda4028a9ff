"""The shipped model diorama: its drawn world, training, export and grading."""
