"""The site's own gate before any bundled code. Installed at the site, never in a bundle; imports Flower, and no torch."""
