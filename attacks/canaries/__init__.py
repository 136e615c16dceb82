"""Canaries: examples included or excluded by coin flips, and the epsilon bound from the coins that one run reveals."""
