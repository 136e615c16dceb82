"""A task's computations with its model: local training, per-example gradients, scores."""
