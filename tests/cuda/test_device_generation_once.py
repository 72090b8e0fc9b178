"""A process has one generation, whichever thread asks first: devices opened under another would be stale to it."""

import os
import threading

import pytest

from kvstored_cuda.devices import handles


def test_threads_that_ask_at_once_have_the_same_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, both, start_ticks = handles._Mine(), threading.Barrier(2), handles.start_ticks
    found: list[handles.Generation] = []

    def together(pid: int) -> int | None:
        both.wait(20.0)
        return start_ticks(pid)

    monkeypatch.setattr(handles, "start_ticks", together)
    threads = [threading.Thread(target=lambda: found.append(mine.of(os.getpid()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert len(found) == 2
    assert found[0] == found[1] == mine.of(os.getpid())


def test_a_forked_child_has_its_own() -> None:
    mine = handles.Generation.mine()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, handles.Generation.mine().to_bytes())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    theirs = handles.Generation.from_bytes(os.read(reading, 4096))
    os.close(reading)
    os.close(writing)
    assert theirs.pid == child
    assert theirs.nonce != mine.nonce
    assert handles.Generation.mine() == mine
