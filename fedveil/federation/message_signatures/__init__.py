"""Signatures on instructions from the ServerApp process to a site's guard, and on the guard's replies."""
