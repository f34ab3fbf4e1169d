"""Adds, lists and removes the keys of a service."""
