"""The device memory that training uses."""
