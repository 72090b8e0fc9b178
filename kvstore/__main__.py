"""`python -m kvstore`: the same as `kvstored`."""

from kvstore.cli.entry import kvstored

kvstored()
