"""Differential privacy: clipping, noise, what a run costs, and the ledger that stops it."""
