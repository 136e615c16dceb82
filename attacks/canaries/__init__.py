"""Canaries: examples that coin flips include or exclude, and the epsilon bound from the coins that one run reveals."""
