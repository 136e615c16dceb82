"""What a task does with its model: local training, gradients of single rows, scores."""
