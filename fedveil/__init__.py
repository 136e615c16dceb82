"""What every method, app, attack and benchmark stands on. Knows no method by name."""

__version__ = "0.1.0"
