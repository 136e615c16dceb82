"""The folder of a run's own model file: `--module FILE` puts it here in the copy of the app that a run sends."""
