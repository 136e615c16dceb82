"""What provisioning makes: keys, kits, compose files, checks."""
