"""What can be followed of a run while it goes on: the round under way, and where each round's figures go."""
