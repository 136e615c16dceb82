"""Relay for a site without a network connection: orders and replies are encrypted, signed files that people carry.

See docs/relay.md.
"""
