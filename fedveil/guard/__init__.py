"""The site's own checks before any bundled code runs. They are installed at the site and are in no bundle.

This package imports Flower but not torch.
"""
