"""How `kvstore-cli` reaches a daemon, and what becomes of what goes wrong: a message and an exit status."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from kvstore.cli.tables import plain
from kvstored.v1.endpoint import ENDPOINT_VARIABLE, TOKEN_FILE_VARIABLE, default_endpoint, token_of_file
from kvstored.v1.errors import InvalidArgument, KVStoreError, Unavailable

if TYPE_CHECKING:
    from kvstore_client import Client

EXIT_UNREACHABLE = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_HELP = (
    "Exit status: 0 done; 1 the daemon cannot be reached or refuses, or you said no; 2 wrong usage; 3 not found."
)

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Way:
    """Which daemon, and with what to come in; None: not said."""

    endpoint: str | None = None
    token_file: str | None = None

    def under(self, above: "Way") -> "Way":
        """What was said behind the command counts more than what stood before it."""
        return Way(self.endpoint or above.endpoint, self.token_file or above.token_file)


def way_options(command: F) -> F:
    """`--endpoint` and `--token-file`, which stand before or after a command."""
    endpoint = click.option(
        "--endpoint",
        metavar="ADDRESS",
        help=f"The daemon, as unix:///PATH, grpc+unix:///PATH, grpc://HOST:PORT or grpcs://HOST:PORT; "
        f"default: ${ENDPOINT_VARIABLE}, then the usual socket.",
    )
    token = click.option(
        "--token-file", metavar="FILE", help=f"For a daemon that asks for a token; default: ${TOKEN_FILE_VARIABLE}."
    )
    return endpoint(token(command))


def common_options(command: F) -> F:
    """What every command takes: where the daemon is, and `--json`."""
    return way_options(click.option("--json", "as_json", is_flag=True, help="For programs.")(command))


def fail(message: str, status: int) -> NoReturn:
    """Ends the program; the message may have parts that clients wrote."""
    click.echo(f"kvstore-cli: {plain(message)}", err=True)
    sys.exit(status)


@contextmanager
def connected(way: Way) -> Iterator["Client"]:
    """A client of the daemon; what a call raises ends the program with a message and its status."""
    from kvstore_client import Client

    endpoint = way.endpoint or default_endpoint()
    logging.getLogger("kvstore_client").setLevel(logging.CRITICAL)  # what went wrong is said once, below
    options: dict[str, Any] = {"name": "kvstore-cli"}
    try:
        if way.token_file:
            options["token"] = token_of_file(way.token_file)
        with Client(endpoint, **options) as client:
            yield client
    except Unavailable as error:
        click.echo(
            f"kvstore-cli: no daemon at {plain(endpoint)}: {plain(str(error))}\n"
            f"Start one with `kvstored`, or name another with --endpoint or ${ENDPOINT_VARIABLE}.",
            err=True,
        )
        sys.exit(EXIT_UNREACHABLE)
    except InvalidArgument as error:
        fail(str(error), EXIT_USAGE)
    except KVStoreError as error:
        fail(f"the daemon at {endpoint} refused: {error}", EXIT_UNREACHABLE)


def confirm(question: str, *, yes: bool) -> None:
    """Goes on only with `--yes` or a yes at a terminal. Ends the program otherwise."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail(f"{question} There is no terminal to ask at: add --yes to go on", EXIT_USAGE)
    if not click.confirm(f"{plain(question)} Go on?", err=True):
        fail("nothing was changed", EXIT_UNREACHABLE)


def hex_bytes(text: str, what: str, least: int, most: int) -> bytes:
    """Bytes of hexadecimal digits; wrong usage for anything else."""
    wanted = f"{2 * least}" if least == most else f"{2 * least} to {2 * most} (an even number of)"
    try:
        value = bytes.fromhex(text) if text.isalnum() else b""
    except ValueError:
        value = b""
    if not least <= len(value) <= most:
        raise click.UsageError(f"{what} {plain(text[:80])!r} is not {wanted} hexadecimal digits")
    return value
