"""What several papers' presets share."""
