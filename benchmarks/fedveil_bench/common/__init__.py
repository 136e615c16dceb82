"""Code shared by presets for several papers."""
