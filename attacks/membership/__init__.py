"""Attacks that tell members of the training rows from others."""
