"""The interfaces between methods, tasks, sites and servers, and their value types. Nothing concrete."""
