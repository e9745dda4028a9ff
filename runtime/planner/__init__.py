"""Decides, before anything runs, what will run where and why."""
