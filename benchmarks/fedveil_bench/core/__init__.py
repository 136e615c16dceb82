"""Presets for the system itself: training, folding, rounds, workers."""
