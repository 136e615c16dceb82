"""Presets for FedRand and its baselines."""
