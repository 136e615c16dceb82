"""Checks that a site runs before any bundled code. They are installed at the site and are part of no bundle.

This package imports Flower but not torch.
"""
