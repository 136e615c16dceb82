"""Attacks on the hidden part of the server's or a client's model."""
