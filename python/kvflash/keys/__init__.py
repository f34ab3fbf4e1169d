"""Adds, lists and removes the API keys of a service."""
