"""A site's policy, and the conditions that a run must meet before any training."""
