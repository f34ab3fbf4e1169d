"""Who the workers are: flags, names in DNS and discovery, told to a core."""
