"""A site's node config, its policy and its private state."""
