"""The audit of a run: its attacks, their targets and controls, and the findings."""
