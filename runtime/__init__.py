"""Tandem's runtime: everything behind `app.py`. The README's architecture section says what lives where."""

__version__ = "0.1.0"
