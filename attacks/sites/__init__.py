"""Attacks on what a site's rows have in common: not told of a row, and not hidden by a guarantee for single rows."""
