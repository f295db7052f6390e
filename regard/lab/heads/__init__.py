"""Ways of merging heads, and kinds of positions."""
