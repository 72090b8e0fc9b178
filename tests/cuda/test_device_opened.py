"""The table of open handles under many threads: mapped once, unmapped once, whatever the order."""

import itertools
import os
import random
import threading
from collections import Counter

import pytest

from kvstored_cuda.devices import Generation, Handle, HandleKind, Thing
from kvstored_cuda.devices.errors import DeviceTimeout, InvalidHandle
from kvstored_cuda.devices.handles import TOKEN_BYTES
from kvstored_cuda.devices.host_device import HostDevice
from kvstored_cuda.devices.opened import Opened

THREADS, ROUNDS, HANDLES = 8, 300, 3
JOIN_S = 60.0


def handle(serial: int) -> Handle:
    other = Generation(1, 1, b"another.")
    return Handle(Thing.MEMORY, HandleKind.IPC, other, serial, "HOST-x", 1, 4096, bytes(TOKEN_BYTES))


def test_threads_that_open_and_close_the_same_handles_never_see_one_unmapped() -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    opened, addresses, mapped = Opened(), itertools.count(1), Counter[int]()
    wrong: list[str] = []

    def map_it() -> int:
        address = next(addresses)
        mapped[address] += 1
        return address

    def unmap(address: int) -> None:
        mapped[address] -= 1

    def work(chance: random.Random) -> None:
        for _ in range(ROUNDS):
            uses = [opened.open(handle(chance.randrange(HANDLES)), map_it, unmap) for _ in range(chance.randrange(4))]
            wrong.extend(f"{use.address} is not mapped" for use in uses if mapped[use.address] != 1)
            chance.shuffle(uses)
            for use in uses:
                use.close()

    threads = [threading.Thread(target=work, args=(random.Random(seed + i),)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    assert not wrong
    assert len(opened) == 0
    assert set(mapped.values()) == {0}


def test_an_open_that_fails_leaves_nothing_and_the_next_one_tries_again() -> None:
    opened = Opened()

    def refused() -> int:
        raise InvalidHandle("no")

    with pytest.raises(InvalidHandle):
        opened.open(handle(1), refused, lambda _: None)
    assert len(opened) == 0
    assert opened.open(handle(1), lambda: 7, lambda _: None).address == 7


def test_a_close_that_times_out_is_still_open_and_can_be_asked_again() -> None:
    opened, answers = Opened(), [DeviceTimeout("late"), None]

    def unmap(_: int) -> None:
        answer = answers.pop(0)
        if answer:
            raise answer

    use = opened.open(handle(1), lambda: 7, unmap)
    with pytest.raises(DeviceTimeout):
        use.close()
    assert len(opened) == 1
    again = opened.open(handle(1), lambda: 8, lambda _: None)
    assert again.address == 8  # what is being unmapped is nobody's new mapping
    again.close()
    use.close()
    use.close()
    assert (len(opened), answers) == (0, [])


def test_a_close_that_fails_is_told_and_counts_no_more() -> None:
    opened = Opened()

    def refused(_: int) -> None:
        raise InvalidHandle("no")

    use = opened.open(handle(1), lambda: 7, refused)
    with pytest.raises(InvalidHandle):
        use.close()
    assert len(opened) == 0


def test_a_device_that_is_closed_twice_closes_nothing_of_anybody_else() -> None:
    """Found here: the second close closed whatever had got the descriptor's number meanwhile."""
    device = HostDevice("HOST-closed", 1 << 20)
    device.close()
    taken = [os.memfd_create(f"after-{n}") for n in range(8)]
    device.close()
    for descriptor in taken:
        os.fstat(descriptor)
        os.close(descriptor)
