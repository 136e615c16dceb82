"""Attacks that rebuild rows from gradients."""
