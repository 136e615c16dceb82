"""Benchmarks for FedVeil: presets, their runners, and their measurements. They use only FedVeil's public modules."""
