"""`kvstored`: starts the daemon, or shows the settings it would start with.

Exit status: what the daemon returns; where it cannot start, that of the error (kvstore/errors.py): 2 for settings that
are wrong, 1 for a machine that is not as they need it.
What the daemon itself needs is imported after the settings are known to be right, so that
a mistake in them is reported at once.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from kvstore.config import Effective, as_written, describe, load
from kvstore.errors import ConfigError, StartupError

PIPE_COLUMNS = 10_000
"""The width for a reader that is no terminal: lines are for its tools to break."""

F = TypeVar("F", bound=Callable[..., Any])
Given = tuple[str | None, tuple[str, ...]]
"""`--config` and every `--set` that stood before the subcommand."""


def settings_options(command: F) -> F:
    """`--config` and `--set`, which stand before or after a subcommand."""
    config = click.option("--config", "config_file", metavar="FILE", help="A TOML file with settings.")
    override = click.option(
        "--set", "overrides", metavar="SECTION.KEY=VALUE", multiple=True, help="One setting; again for more."
    )
    return config(override(command))


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@settings_options
@click.version_option(package_name="kvstored", prog_name="kvstored")
@click.pass_context
def main(context: click.Context, config_file: str | None, overrides: tuple[str, ...]) -> None:
    """Keeps the KV cache of prompts for the LLM engines of this machine.

    Without a command, starts the daemon in the foreground. Settings come from --set, then
    the environment (KVSTORED_SECTION__KEY), then the file, then the defaults; `kvstored
    config` shows them.
    """
    context.obj = (config_file, overrides)
    if context.invoked_subcommand is None:
        effective = _load(config_file, overrides)
        try:
            from kvstore.daemon import run

            status = run(effective)
        except StartupError as error:
            status = _said(error)
        _end(status)


@main.command()
@settings_options
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_obj
def config(
    above: tuple[str | None, tuple[str, ...]], config_file: str | None, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Shows the effective settings and where each came from."""
    file_above, overrides_above = above
    if file_above is not None and config_file is not None:
        raise click.UsageError("--config is given twice")
    effective = _load(file_above if config_file is None else config_file, (*overrides_above, *overrides))
    if as_json:
        values = as_written(effective)
        rows = {key: {"value": value, "source": effective.sources[key]} for key, value in values.items()}
        click.echo(json.dumps(rows, indent=2))
    else:
        _print_settings(describe(effective))


def _load(config_file: str | None, overrides: Sequence[str]) -> Effective:
    try:
        return load(None if config_file is None else Path(config_file), overrides, os.environ)
    except ConfigError as error:
        _fail(error)


def _fail(error: StartupError) -> NoReturn:
    sys.exit(_said(error))


def _said(error: StartupError) -> int:
    click.echo(f"kvstored: {error}", err=True)
    return error.exit_status


def _end(status: int) -> NoReturn:
    """Ends the process at once, when all that is to be closed is.

    A thread may still be inside RocksDB: its disk is slow to answer, or hangs, or the start failed while its directory
    was being opened. As Python ends, such a thread is ended on its way out of that call, through frames of C++ and
    Rust, which abort the process for it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _print_settings(rows: Sequence[tuple[str, str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", "source", box=None, header_style="bold", pad_edge=False)
    for key, value, source in rows:
        # Text, not str: a value may have brackets, which rich would read as its markup.
        table.add_row(Text(key), Text(value or '""', overflow="fold"), Text(source, overflow="fold"))
    Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(table)


if __name__ == "__main__":
    main(prog_name="kvstored")
