"""The OpenAI-compatible frontend: ``python -m kvflash.frontend``."""
