"""The `fedveil` command, with one file per subcommand."""
