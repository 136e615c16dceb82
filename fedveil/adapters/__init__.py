"""What is trained on a base model. Each adapter owns its shapes, its initial draw, its attachment and its checks."""
