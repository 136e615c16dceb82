"""A site's policy, and what it asks of a run before anything is trained."""
