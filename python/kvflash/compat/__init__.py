"""Names of other projects, for scripts that were written against them."""
