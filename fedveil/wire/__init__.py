"""Codecs (one file each), the message envelope, and message capture."""
