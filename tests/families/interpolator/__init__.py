"""Tests of the network that interpolates."""
