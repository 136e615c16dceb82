"""Starting a site or a server, and saying why it does not come up."""
