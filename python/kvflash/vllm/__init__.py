"""Starts vLLM with KV events enabled, and registers it."""
