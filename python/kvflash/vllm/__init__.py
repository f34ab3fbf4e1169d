"""Starts vLLM with its KV events on, and registers it."""
