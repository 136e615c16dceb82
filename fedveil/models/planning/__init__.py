"""Estimate a run's needs from the base's config.json alone: memory by part, and compute."""
