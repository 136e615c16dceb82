"""Presets for FedQSN and its baselines."""
