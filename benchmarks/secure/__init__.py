"""What secure aggregation costs."""
