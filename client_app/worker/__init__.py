"""A site's worker: a process that keeps model and examples in memory between rounds."""
