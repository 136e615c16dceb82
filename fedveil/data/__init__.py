"""Examples of a data set: reading, decoding, partitioning among sites, and batches."""
