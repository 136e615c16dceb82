"""Estimate a run's memory, by part, and its compute, from nothing but the base's config.json."""
