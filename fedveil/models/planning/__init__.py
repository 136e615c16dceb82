"""What a run would need of a machine, from a base's config.json alone: memory by part, and work."""
