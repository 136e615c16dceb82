"""Runs: submit, watch, report, audit."""
