"""To try and to measure: demo, bench, methods."""
