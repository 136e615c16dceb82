"""The same work in the peers' own programs."""
