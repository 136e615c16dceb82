"""Create the small bases that ship with FedVeil."""
