"""The same work in peers' own programs."""
