"""Decisions: which block is where, who holds it, what goes when room is needed.

Nothing here does I/O, reads a clock or starts a thread. Time comes in as an argument,
work for others goes out as jobs, and `Store.check()` proves the whole after any step.
"""
