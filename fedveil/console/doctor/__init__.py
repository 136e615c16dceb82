"""Checks of this machine, run by `fedveil doctor` and at the start of a site."""
