"""Commands for getting started: demo, methods, completion."""
