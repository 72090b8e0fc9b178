"""Bytes: the memory, index and files that the core's decisions are about."""
