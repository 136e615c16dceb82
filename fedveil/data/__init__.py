"""Rows of a data set: reading, decoding, cutting into sites' parts, batches."""
