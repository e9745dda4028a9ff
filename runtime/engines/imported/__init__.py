"""Engines made elsewhere: read, matched with a component, bridged by declared adapters, proven, and only then used."""
