"""The console entry points, which work without the packages of the `daemon` extra as far as to say so.

An engine's environment has kvstored for the SDK, and there both programs are on the path
without what they need. So nothing outside the standard library is imported at the top.

Standard input, output and error may be closed, full, or read by nobody. Closed ones become
/dev/null before anything else is opened, which would get their numbers: a message would end
up in a socket. What cannot be written ends the program with a line, not with a traceback.
"""

import gc
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

DAEMON_PACKAGES = (
    "click",
    "rich",
    "pydantic",
    "pydantic_settings",
    "aiohttp",
    "prometheus_client",
    "cryptography",
    "structlog",
    "grpc_health",
    "grpc_reflection",
)


def kvstored() -> None:
    """The daemon: `kvstored`. Ends the process, also where nobody reads why."""
    gc.disable()  # till it serves (Daemon.start): what is made before stays, and looking for garbage in it takes 8 %
    _open_closed()
    from kvstore.logqueue import bounded

    sys.stderr = bounded(sys.stderr.fileno())
    _need("kvstored")
    from kvstore.cli.daemon import main

    _run(main, "kvstored")


def kvstore_cli() -> None:
    """Administration of a running daemon: `kvstore-cli`. Ends the process."""
    _open_closed()
    _need("kvstore-cli")
    from kvstore.cli.admin import main

    _run(main, "kvstore-cli")


def _open_closed() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _run(main: Callable[..., Any], program: str) -> NoReturn:
    try:
        try:
            main(prog_name=program)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:  # of something else than a stream that was open already
            raise
        # Python flushes it once more at its end, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"{program}: what was to be shown cannot be written: {error.strerror}")
    sys.exit(0)


def _need(program: str) -> None:
    missing = [name for name in DAEMON_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        sys.exit(f"{program} needs packages that are not installed ({names}): pip install 'kvstored[daemon]'")


if __name__ == "__main__":
    kvstored()
