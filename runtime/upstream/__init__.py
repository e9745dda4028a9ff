"""Uses of private names of libraries: one module per library, each use with its reason and a test."""
