"""Estimate a run's needs from only the base's config.json: memory by part, and compute."""
