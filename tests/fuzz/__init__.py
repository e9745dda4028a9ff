"""Requests made up at random, against the app as it runs."""
