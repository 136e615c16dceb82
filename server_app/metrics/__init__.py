"""Live metrics of a run: the round under way, and the sinks that receive each round's metrics."""
