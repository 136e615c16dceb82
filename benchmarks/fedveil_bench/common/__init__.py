"""Code shared by the presets of several papers."""
