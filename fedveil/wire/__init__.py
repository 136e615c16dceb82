"""Codecs (one file each), the envelope around them, and message capture."""
