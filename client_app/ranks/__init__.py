"""The processes of a site that train together; each is a rank of fedveil.training.ranks."""
