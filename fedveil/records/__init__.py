"""Files that outlive a process: states, checkpoints and audit logs."""
