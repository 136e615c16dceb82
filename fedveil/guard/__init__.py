"""The site's own gate before any bundled code. It is installed at the site and is in no bundle.

It imports Flower, and no torch.
"""
