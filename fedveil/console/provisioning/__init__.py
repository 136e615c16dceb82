"""Create the files of a federation: keys, kits, compose files, checks."""
