"""Commands to try FedVeil and to measure it: demo, bench, methods."""
