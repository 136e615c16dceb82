"""The memory that training takes on its device."""
