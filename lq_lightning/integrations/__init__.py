"""Adapters for other packages; each module is imported only where it is used."""
