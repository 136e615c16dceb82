"""Presets for the costs of secure aggregation, and for attacks on secure runs."""
