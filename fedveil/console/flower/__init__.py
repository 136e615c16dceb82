"""The only Python that knows Flower's programs, flags and ports."""
