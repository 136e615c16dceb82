"""Presets of FedRand and its baselines."""
