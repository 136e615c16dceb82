"""Run folders, read."""
