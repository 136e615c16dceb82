"""Checks at a site during a round: the received broadcast, and how many examples a trainer uses."""
