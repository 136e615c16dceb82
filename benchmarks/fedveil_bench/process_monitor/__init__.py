"""Measure processes from the outside: their CPU time and memory, and the bytes exchanged between them."""
