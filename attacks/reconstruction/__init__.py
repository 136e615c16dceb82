"""Attacks that reconstruct examples from gradients."""
