"""Presets for differential privacy: the accountant's charges, and the unit that a guarantee protects."""
