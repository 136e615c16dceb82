"""Start a site or a server, and explain why if it does not start."""
