"""Canaries: rows that a coin put in or left out, and the epsilon that one run shows by how many coins are guessed."""
