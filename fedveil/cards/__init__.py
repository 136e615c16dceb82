"""The privacy card of a run: what its parties saw, what is guaranteed to whom, and what is not protected."""
