"""Costs of secure aggregation, and attacks on its runs."""
