"""Training in several processes of a machine: rank 0 is the site's worker, the others compute for it."""
