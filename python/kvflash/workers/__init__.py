"""Lists the workers of a running service, and takes them out of service."""
