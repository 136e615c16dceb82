"""Measurements of processes from outside: their CPU time and memory, and the bytes between them."""
