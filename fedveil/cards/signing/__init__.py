"""Signatures on a privacy card, and what an audit adds to it."""
