"""Tandem's entry point. No sub-command: the web app; else the command line."""

from runtime.cli import main

if __name__ == "__main__":
    main()
