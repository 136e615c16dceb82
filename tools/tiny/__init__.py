"""Create the small bases that come with FedVeil."""
