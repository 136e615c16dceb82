"""Relay for a site without a connection: orders and replies as encrypted, signed files that people carry.

See docs/relay.md.
"""
