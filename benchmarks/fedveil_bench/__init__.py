"""Benchmarks of FedVeil: presets, their runners, and their measurements. They use only public modules of FedVeil."""
