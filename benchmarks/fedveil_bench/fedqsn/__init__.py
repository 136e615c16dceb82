"""Presets of FedQSN and its baselines."""
