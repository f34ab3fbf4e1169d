"""Starts SGLang with KV events enabled, and registers it."""
