"""Replays a recorded trace of prompts against a service at the recorded times, and measures."""
