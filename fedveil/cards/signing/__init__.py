"""Signatures on a privacy card."""
