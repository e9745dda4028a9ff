"""Tandem's runtime: everything behind `app.py`. What lives where: README.md, docs/architecture.md."""

__version__ = "0.1.0"
