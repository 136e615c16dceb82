"""The sub-commands of `fedveil`, a file each, in the groups that the help shows."""
