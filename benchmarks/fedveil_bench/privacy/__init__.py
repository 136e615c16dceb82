"""Presets of differential privacy: what the accountant charges, and the unit that a guarantee protects."""
