"""Read run folders and the state folders of sites."""
