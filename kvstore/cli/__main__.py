"""`python -m kvstore.cli`: the same as `kvstore-cli`."""

from kvstore.cli.entry import kvstore_cli

kvstore_cli()
