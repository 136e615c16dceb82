"""Live metrics of a run: the current round, and the sinks that receive each round's metrics."""
