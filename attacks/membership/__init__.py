"""Attacks that distinguish training examples (members) from other examples."""
