"""Model computations for tasks: local training, per-example gradients, scores."""
