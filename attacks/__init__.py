"""What an adversary can do with what it saw. One file an attack; an attack reads a tap and its declared knowledge."""
