"""Attacks on what a server or a client hides of its model."""
