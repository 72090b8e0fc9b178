"""kvstored that knows few namespaces, by numbers that are good for a moment: `-m tests.daemon.few_namespaces`."""

from kvstore.cli.daemon import main
from kvstore.core import holds, spaces
from kvstore.tiers import ledger

NAMESPACES = 16
IDLE_S = 1.0

if __name__ == "__main__":
    assert ledger.SESSIONS_AT, "the ledger is laid out for as many as ever"
    holds.NAMESPACES_MAX, spaces.IDLE_S, spaces.LOOK_S = NAMESPACES, IDLE_S, 0.05
    main(prog_name="kvstored")
