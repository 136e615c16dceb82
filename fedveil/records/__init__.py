"""Files that outlive a process, such as states, checkpoints and audit logs."""
