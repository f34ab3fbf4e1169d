"""Shows a routing decision of a running frontend or router: every candidate with its cost."""
