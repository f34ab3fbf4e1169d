"""Starts an engine with events enabled, and registers it for frontends."""
