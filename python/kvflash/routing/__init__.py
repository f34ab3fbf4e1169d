"""KV-aware routing inside your own process."""
