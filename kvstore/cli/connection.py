"""How `kvstore-cli` reaches a daemon, and what becomes of what goes wrong: a message and an exit status."""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from kvstore.cli import trouble
from kvstore.cli.tables import plain
from kvstored.v1 import ADMINISTRATION_CLIENT
from kvstored.v1.endpoint import CA_VARIABLE, ENDPOINT_VARIABLE, TOKEN_FILE_VARIABLE, default_endpoint, token_of_file
from kvstored.v1.errors import DeadlineExceeded, InvalidArgument, KVStoreError, Unauthenticated, Unavailable

if TYPE_CHECKING:
    from kvstore_client import Client

EXIT_DONE, EXIT_UNREACHABLE, EXIT_USAGE, EXIT_NOT_FOUND, EXIT_NOT_WELL = range(5)
EXITS = {
    EXIT_DONE: "done",
    EXIT_UNREACHABLE: "the daemon cannot be reached or refuses, you said no, or the answer cannot be written",
    EXIT_USAGE: "wrong usage",
    EXIT_NOT_FOUND: "not found: there is no such key, namespace, session, segment or tenant",
    EXIT_NOT_WELL: "the SSD is not well: blocks were not written, or were not what they should be",
}
"""The exit statuses of every command of `kvstore-cli`, and of no other program."""

OWN_TENANT = ""
"""Of the connection: a token's own tenant, else "default". Whom a command is about, its request says."""

EXIT_HELP = f"Exit status: {'; '.join(f'{status} {meaning}' for status, meaning in EXITS.items())}."

DIGITS = re.compile(r"([0-9a-f]{2})+")

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Way:
    """Which daemon, and with what to come in; None: not said."""

    endpoint: str | None = None
    token_file: str | None = None
    ca: str | None = None

    def under(self, above: "Way") -> "Way":
        """What was said behind the command counts more than what stood before it."""
        return Way(self.endpoint or above.endpoint, self.token_file or above.token_file, self.ca or above.ca)


def way_options(command: F) -> F:
    """`--endpoint`, `--token-file` and `--ca`, which stand before or after a command."""
    endpoint = click.option(
        "--endpoint",
        metavar="ADDRESS",
        help=f"The daemon, as unix:///PATH, grpc+unix:///PATH, grpc://HOST:PORT or grpcs://HOST:PORT; "
        f"default: ${ENDPOINT_VARIABLE}, then the usual socket.",
    )
    token = click.option(
        "--token-file", metavar="FILE", help=f"For a daemon that asks for a token; default: ${TOKEN_FILE_VARIABLE}."
    )
    ca = click.option(
        "--ca", metavar="FILE", help=f"Authority of the certificate behind grpcs://, PEM; default: ${CA_VARIABLE}."
    )
    return endpoint(token(ca(command)))


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
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.getLogger("kvstore_client").setLevel(logging.CRITICAL)  # what went wrong is said once, below
    options: dict[str, Any] = {"name": ADMINISTRATION_CLIENT, "tenant": OWN_TENANT, "ca": way.ca}
    if way.ca is not None and not endpoint.startswith("grpcs://"):
        raise click.UsageError(f"--ca is for grpcs://, and the endpoint is {plain(endpoint[:200])}")
    try:
        if way.token_file:
            options["token"] = token_of_file(way.token_file)
        with Client(endpoint, **options) as client:
            yield client
    except Unavailable as error:
        why = trouble.unreachable(endpoint, way.ca)
        asking = trouble.as_its_user(endpoint) if "permission denied" in str(error) else ""
        if why:
            said = f"no kvstored is reached at {endpoint}: {why}"
        elif endpoint in str(error):
            said = trouble.with_another(f"{error}{asking}")
        else:
            said = f"the daemon at {endpoint} does not answer: {error}"
        fail(said, EXIT_UNREACHABLE)
    except Unauthenticated as error:
        fail(f"the daemon at {endpoint} refused: {error}{trouble.as_its_user(endpoint)}", EXIT_UNREACHABLE)
    except InvalidArgument as error:
        fail(str(error), EXIT_USAGE)
    except DeadlineExceeded as error:
        fail(f"the daemon at {endpoint} did not answer in time: {error}", EXIT_UNREACHABLE)
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
    """Bytes of hexadecimal digits as they are shown, one spelling for one thing; wrong usage for anything else."""
    if not DIGITS.fullmatch(text) or not 2 * least <= len(text) <= 2 * most:
        wanted = f"{2 * least}" if least == most else f"{2 * least} to {2 * most} (an even number of)"
        raise click.UsageError(
            f"{what} {plain(text[:80])!r} is not {wanted} hexadecimal digits, 0-9 and a-f, as `kvstore-cli` shows them"
        )
    return bytes.fromhex(text)
