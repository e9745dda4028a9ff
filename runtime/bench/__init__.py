"""Configurations side by side: how fast, how much memory, how alike their videos are."""
