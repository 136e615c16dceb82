"""The folder for your own models: `task.module = NAME` selects the file NAME.py in it."""
