"""Adapters: the trained parts of a base model. Each defines its shapes, initial values, attachment and checks."""
