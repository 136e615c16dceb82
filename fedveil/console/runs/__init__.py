"""Read run folders and sites' state folders."""
