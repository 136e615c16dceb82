"""A site's files on disk: private state from its runs, the rounds it has served, and the ids of its data sets."""
