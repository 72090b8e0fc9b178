"""The console entry points, which work without the packages of the `daemon` extra as far as to say so.

An engine's environment has kvstored for the SDK, and there both programs are on the path
without what they need. So nothing outside the standard library is imported at the top.
"""

import importlib.util
import sys

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
    """The daemon: `kvstored`. Ends the process."""
    _need("kvstored")
    from kvstore.cli.daemon import main

    main(prog_name="kvstored")


def kvstore_cli() -> None:
    """Administration of a running daemon: `kvstore-cli`. Ends the process."""
    _need("kvstore-cli")
    from kvstore.cli.admin import main

    main(prog_name="kvstore-cli")


def _need(program: str) -> None:
    missing = [name for name in DAEMON_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        sys.exit(f"{program} needs packages that are not installed ({names}): pip install 'kvstored[daemon]'")


if __name__ == "__main__":
    kvstored()
