"""Differential privacy: clipping, noise, the cost of a run, and the ledger that limits it."""
