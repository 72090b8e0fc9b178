"""The contract of kvstored: messages, shared-memory layout, errors. No behaviour of either side."""
