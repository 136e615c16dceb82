"""Attacks on recorded runs: one file per attack, which reads captured messages and declared knowledge."""
