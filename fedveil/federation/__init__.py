"""Cohorts, exchanges between server and clients, and a complete federation in one process, all without Flower."""
