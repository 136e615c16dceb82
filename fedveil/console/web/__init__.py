"""A local web dashboard that shows the activity of a federation or a site."""
