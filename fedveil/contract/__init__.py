"""Interfaces between methods, tasks, sites and servers, and their value types; no implementations."""
