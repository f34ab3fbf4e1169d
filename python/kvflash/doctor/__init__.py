"""Checks indexers and their engines, and reports faults: ``python -m kvflash.doctor``."""
