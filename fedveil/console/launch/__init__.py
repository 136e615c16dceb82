"""Start a site or a server, and explain why it does not start."""
