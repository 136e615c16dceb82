"""Attacks on common properties of a site's examples, which example-level privacy does not protect."""
