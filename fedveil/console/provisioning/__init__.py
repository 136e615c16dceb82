"""Create and check a federation's files: keys, kits, compose files, registries."""
