"""Starts SGLang with its KV events on, and registers it."""
