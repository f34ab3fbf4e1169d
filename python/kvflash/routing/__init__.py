"""Routing in Python: what routers tell each other."""
