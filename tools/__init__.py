"""What makes the shipped model diorama: its world, its training and its grading."""
