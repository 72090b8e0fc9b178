"""Benchmarks of kvstored: `make bench`. Every speed is a ratio to a reference measured in the same run."""
