"""A site without any connection: orders and replies as sealed, signed files that somebody carries. docs/relay.md."""
