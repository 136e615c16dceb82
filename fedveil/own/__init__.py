"""The folder of own models: `task.module = NAME` names the file NAME.py in it."""
