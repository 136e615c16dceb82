"""The sub-commands of `fedveil`, one file each, in the groups of the help text."""
