"""A site's worker: a process that keeps model and rows in memory between rounds."""
