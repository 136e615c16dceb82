"""Who exchanges what with whom, without Flower."""
