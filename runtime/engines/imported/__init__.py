"""Imported engine files: read, matched with a component, adapted, and verified against PyTorch before they are used."""
