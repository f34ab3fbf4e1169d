"""Sends a recorded trace of prompts to a service at the recorded times, and measures."""
