"""Finds the workers, by flags, names in DNS and discovery, and passes them to a core."""
