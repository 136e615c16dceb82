"""Benchmarks of FedVeil: presets, what runs them, and what they measured. Only public modules of FedVeil are used."""
