"""Checks at a site during a round: on the received broadcast, and on the number of examples that a trainer uses."""
