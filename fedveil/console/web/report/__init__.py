"""The report page and its components."""
