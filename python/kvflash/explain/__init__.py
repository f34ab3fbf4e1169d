"""Shows the decision of a running frontend or router: every candidate with its cost."""
