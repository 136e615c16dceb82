"""The audit of a run: which attacks run, on what, against which controls, and what they find."""
