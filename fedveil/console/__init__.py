"""The `fedveil` command, with one file per sub-command."""
