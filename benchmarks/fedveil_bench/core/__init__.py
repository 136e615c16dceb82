"""Presets of the system itself: training, folding, rounds, workers."""
