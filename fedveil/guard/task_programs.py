"""The programs that Flower starts for tasks, grouped by how a guarded SuperExec treats them. Does not import Flower."""

from __future__ import annotations

CLIENT_APP, SERVER_APP = "flwr-clientapp", "flwr-serverapp"  # names of task types, and of the programs that run them
# Flower's other programs for tasks; a test compares them with Flower's task types.
REFUSED_PROGRAMS = ("flwr-agentapp", "flwr-connector", "flwr-model", "flwr-simulation")
