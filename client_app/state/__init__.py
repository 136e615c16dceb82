"""A site's files on disk: private states of its runs, the rounds it has served, and ids of its data sets."""
