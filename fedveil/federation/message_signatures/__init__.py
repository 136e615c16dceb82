"""Signatures of instructions and replies from the ServerApp's process to the guard at a site, and back."""
