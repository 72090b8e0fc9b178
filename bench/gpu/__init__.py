"""What `make gpu-check` proves and measures on a machine with a GPU: tests, copies, requests, deaths, first tokens."""
