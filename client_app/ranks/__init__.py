"""A site's processes that train together; each is a rank in fedveil.training.ranks."""
