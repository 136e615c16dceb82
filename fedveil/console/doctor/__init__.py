"""Checks on this machine, run by `fedveil doctor` and when a site starts."""
