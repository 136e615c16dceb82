"""Canaries: examples that coins include or exclude, and the epsilon bound from the coins that one run reveals."""
