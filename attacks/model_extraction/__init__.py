"""Attacks on the hidden part of a server's or a client's model."""
