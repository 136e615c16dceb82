"""Checks at a site during a round: the received broadcast, and the number of examples that a trainer uses."""
