"""A task's work with its model: local training, per-example gradients, scores."""
