"""Engines made elsewhere: read, matched with a component, adapted, verified against PyTorch, and only then used."""
