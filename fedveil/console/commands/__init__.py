"""The `fedveil` subcommands, one file each, grouped as in the help text."""
