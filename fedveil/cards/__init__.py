"""The privacy card of a run: what its parties saw, the guarantees for each party, and what is not protected."""
