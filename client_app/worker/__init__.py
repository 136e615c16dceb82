"""A site's worker: a process that keeps the model and examples in memory between rounds."""
