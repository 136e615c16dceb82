"""Training in several processes on one machine: rank 0 is the site's worker, and the others compute for it."""
