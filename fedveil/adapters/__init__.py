"""Adapters: the trained parts of a base model. Each adapter defines its shapes, its initial values, how it attaches to
the model, and its checks."""
