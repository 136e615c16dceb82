"""Cohorts, exchanges between server and clients, and a whole federation in one process; all without Flower."""
