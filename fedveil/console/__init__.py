"""The `fedveil` command, one file a sub-command."""
