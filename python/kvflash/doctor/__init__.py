"""Checks indexers and their engines, and names what is wrong: ``python -m kvflash.doctor``."""
