"""Codecs (one file each), the envelope around them, and the tap, which records what the other side could see."""
