"""Event transports: opaque bytes from the engines' sockets to the core."""
