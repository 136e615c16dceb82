"""What outlives a process: states, audit logs, checkpoints."""
