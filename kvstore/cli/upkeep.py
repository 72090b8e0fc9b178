"""`kvstore-cli flush` and `kvstore-cli verify`: what an operator does with the SSD tier as a whole."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from kvstore.cli.connection import EXIT_HELP, EXIT_NOT_WELL, Way, common_options, connected, fail
from kvstore.cli.tables import count, human_bytes

WAIT_MS = 500
VERIFY_BLOCKS = 256
"""In one call: its answer is a step of the progress bar."""

TROUBLE_S = 60.0
"""Verify waits so long for an SSD that goes out of use while it reads: it heals by itself once the cause is gone."""

OPENING_S = 3600.0
"""And for one whose records are still being read, which takes as long as there are many."""

TROUBLE_LOOK_S = 1.0


@click.command(epilog=EXIT_HELP)
@common_options
@click.pass_obj
def flush(above: Way, endpoint: str | None, token_file: str | None, ca: str | None, as_json: bool) -> None:
    """Writes to the SSD what only memory has, and waits until it is there.

    Of what is stored meanwhile nothing is said. An SSD that is out of use is not waited for, one
    whose records are being read is. Ctrl-C stops the waiting, not the writing.
    """
    from kvstore_client import admin

    with connected(Way(endpoint, token_file, ca).under(above)) as client:
        reply = admin.flush(client, WAIT_MS)
        first = reply.left
        with _progress("writing", shown=not as_json) as say:
            while not reply.done:
                first = max(first, reply.left)
                say(first - reply.left, first, f"{count(reply.left)} blocks left")
                reply = admin.flush(client, WAIT_MS)
    if as_json:
        click.echo(json.dumps({"left": reply.left, "trouble": reply.trouble}, indent=2))
    if reply.left or reply.trouble:
        why = reply.trouble or "there is no room for them on the SSD, or it could not take them (`kvstore-cli stats`)"
        fail(f"{count(reply.left)} blocks are in memory alone: {why}", EXIT_NOT_WELL)
    if not as_json:
        click.echo("all that memory has is on the SSD")


@click.command(epilog=EXIT_HELP)
@common_options
@click.pass_obj
def verify(above: Way, endpoint: str | None, token_file: str | None, ca: str | None, as_json: bool) -> None:
    """Reads back all that is on the SSD, and removes what is not what it should be.

    Clients' reads go first, and nothing comes to memory by it. An SSD that is out of use is not
    waited for, unless it was in use before: then for a minute. Ctrl-C stops it.
    """
    from kvstore_client import admin

    sums = dict.fromkeys(("blocks", "size_bytes", "bad", "failed"), 0)
    cursor, trouble, patience = 0, "", _Patience()
    with (
        connected(Way(endpoint, token_file, ca).under(above)) as client,
        _progress("reading", shown=not as_json) as say,
    ):
        while True:
            reply = admin.verify(client, cursor, VERIFY_BLOCKS)
            for name in sums:
                sums[name] += getattr(reply, name)
            cursor = reply.cursor
            if not cursor:
                break
            trouble = patience.ends(reply.trouble, opening=reply.opening, moved=bool(reply.blocks))
            if trouble:
                break
            about = f"{human_bytes(sums['size_bytes'])}, {count(sums['bad'])} bad, {count(sums['failed'])} failed"
            about += f"; waiting: {reply.trouble}" if reply.trouble else ""
            say(sums["blocks"], max(reply.total, sums["blocks"]), about)
            if reply.trouble:
                time.sleep(TROUBLE_LOOK_S)
    if as_json:
        click.echo(json.dumps({**sums, "trouble": trouble}, indent=2))
    else:
        click.echo(
            f"read {count(sums['blocks'])} blocks ({human_bytes(sums['size_bytes'])}): "
            f"{count(sums['blocks'] - sums['bad'] - sums['failed'])} good, {count(sums['bad'])} bad and removed, "
            f"{count(sums['failed'])} could not be read"
        )
    if trouble:
        fail(f"{'not all' if sums['blocks'] else 'nothing'} was read: {trouble}", EXIT_NOT_WELL)
    if sums["bad"] or sums["failed"]:
        fail("not all on the SSD was what it should be; its clients had misses, and never wrong bytes", EXIT_NOT_WELL)


class _Patience:
    """How long an SSD is waited for that cannot be read at present; says so where it begins to wait."""

    def __init__(self) -> None:
        self._in_use = False
        self._until = 0.0

    def ends(self, why: str, *, opening: bool, moved: bool) -> str:
        """Why it is not waited for any longer; "" where it is, or need not be."""
        self._in_use = self._in_use or moved or not why
        if not why or moved:
            self._until = 0.0
            return ""
        if not opening and not self._in_use:
            return f"the SSD is out of use: {why}"
        limit_s = OPENING_S if opening else TROUBLE_S
        if not self._until:
            self._until = time.monotonic() + limit_s
            click.echo(f"waiting for the SSD, at most {limit_s:.0f} s: {why}", err=True)
        return f"the SSD has been out of use for {limit_s:.0f} s: {why}" if time.monotonic() > self._until else ""


Say = Callable[[int, int, str], None]
"""How much is done, of how much, and more for people."""


@contextmanager
def _progress(what: str, *, shown: bool) -> Iterator[Say]:
    """A bar at a terminal, on its standard error; nothing elsewhere."""
    if not shown or not sys.stderr.isatty():
        yield lambda done, of, more: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def say(done: int, of: int, more: str) -> None:
            bar.update(task, completed=done, total=of or None, description=more)

        yield say
