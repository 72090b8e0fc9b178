"""Counts are what was asked for, and a client that may only read changes nothing."""

from collections.abc import Callable

import pytest

from kvstore_client import Client, FailedPrecondition
from tests.conftest import RunningDaemon


def test_get_counts_what_it_was_asked_for(daemon: RunningDaemon) -> None:
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("counted", 4096)
        keys = [ns.key(b"%d" % i) for i in range(10)]
        ns.put(keys[:6], bytes(6 * 4096))
        assert len(ns.get(keys)) == 6
        counters = client.stats()["counters"]
        assert (counters["hits"], counters["misses"]) == (6, 4)
        assert (counters["match_hits"], counters["match_misses"]) == (0, 0)


def test_a_read_only_client_changes_nothing(daemon: RunningDaemon) -> None:
    with Client(daemon.endpoint) as writer, Client(daemon.endpoint, read_only=True) as reader:
        ns, seen = writer.raw_namespace("kept", 4096), reader.raw_namespace("kept", 4096)
        keys = [ns.key(b"a")]
        ns.put(keys, bytes(4096))
        changes: list[Callable[[], int]] = [
            lambda: seen.remove(keys),
            lambda: seen.pin(keys, 10.0),
            lambda: seen.unpin(keys),
            seen.clear,
        ]
        for change in changes:
            with pytest.raises(FailedPrecondition, match="read-only"):
                change()
        assert seen.get(keys) == [bytes(4096)]
