"""`kvstore-cli`: looks into a running daemon, takes things away from it, and looks after its SSD."""

import click

from kvstore.cli.connection import EXIT_HELP, Way, way_options
from kvstore.cli.evict import evict
from kvstore.cli.inspect import inspect
from kvstore.cli.stats import stats
from kvstore.cli.upkeep import flush, verify


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_HELP)
@way_options
@click.version_option(package_name="kvstored", prog_name="kvstore-cli")
@click.pass_context
def main(context: click.Context, endpoint: str | None, token_file: str | None, ca: str | None) -> None:
    """Looks into a running kvstored, takes things away from it, and looks after its SSD."""
    context.obj = Way(endpoint, token_file, ca)


for command in (stats, inspect, evict, flush, verify):
    main.add_command(command)


if __name__ == "__main__":
    main(prog_name="kvstore-cli")
