"""Adapters: the trained parts of a base model. Each defines its shapes, initial draw, attachment and checks."""
