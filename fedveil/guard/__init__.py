"""Checks that a site runs before any bundled code. They are installed at the site and are not part of any bundle.

This package imports Flower but not torch.
"""
