"""READY=1 is said once, so it is not lost where systemd has no room for it in that moment."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.sdnotify import Notifier
from tests.conftest import eventually


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    """Which reads nothing until it is read from."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(30)
        yield listening


def filled(systemd: socket.socket) -> int:
    """Its queue has no room any more; messages in it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        count = 0
        try:
            while True:
                other.sendto(b"STATUS=of no interest", systemd.getsockname())
                count += 1
        except BlockingIOError:
            return count


def test_ready_reaches_a_systemd_whose_queue_was_full(systemd: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": systemd.getsockname()})
    waiting = filled(systemd)
    notifier.ready("serving")
    assert [systemd.recv(4096) for _ in range(waiting)] == [b"STATUS=of no interest"] * waiting
    assert systemd.recv(4096) == b"READY=1\nSTATUS=serving"
    notifier.close()


def test_a_notifier_that_is_closed_insists_no_more(systemd: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": systemd.getsockname()})
    filled(systemd)
    notifier.ready("serving")
    notifier.close()
    eventually(lambda: "systemd" not in {thread.name for thread in threading.enumerate()}, what="the thread to end")


def test_without_a_full_queue_it_is_there_at_once_and_no_thread_is_made(systemd: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": systemd.getsockname()})
    notifier.ready("serving")
    systemd.setblocking(False)
    assert systemd.recv(4096) == b"READY=1\nSTATUS=serving"
    notifier.close()
