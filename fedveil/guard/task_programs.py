"""The programs that Flower starts for tasks, by what a guarded SuperExec does with them. Imports nothing of Flower."""

from __future__ import annotations

CLIENT_APP, SERVER_APP = "flwr-clientapp", "flwr-serverapp"  # types of tasks, and the programs that run them
# Flower's other programs for tasks; a test compares them with its types of tasks.
REFUSED_PROGRAMS = ("flwr-agentapp", "flwr-connector", "flwr-model", "flwr-simulation")
