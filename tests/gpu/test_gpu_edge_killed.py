"""Clients of a device that are killed at any moment: readers get whole blocks or none, and nothing stays held."""

import random

from tests.conftest import eventually
from tests.gpu.edge_program import DeviceProgram, Process, programs
from tests.gpu.gpu_nodes import GpuNode
from tests.nodes import block

SLOW = "transfer:delay=0.004; trusting"
"""A block takes so long in the middle, and an event of a dead process says that it is complete: CUDA may do so."""

WRITERS, ROUNDS, BLOCKS_MAX = 2, 5, 12


def check(reader: DeviceProgram, keys: list[bytes]) -> int:
    """Every block that is there is its key's, on the device and in memory; how many there were."""
    found = 0
    for key in keys:
        for slot in reader.acquired_on_device([key]):
            assert reader.read(slot) == block(key, reader.slot_bytes), "a torn block on the device"
            reader.release_on_device([slot])
            found += 1
        slots = reader.load([key]).slots
        reader.check([key], slots)
        reader.release(slots)
    return found


def test_no_reader_meets_a_torn_block_of_a_client_that_was_killed(gpu_node: GpuNode) -> None:
    r, names, found = random.Random(5), [], 0
    with programs(gpu_node) as make:
        reader = make()
        for round_ in range(ROUNDS):
            fresh = [f"many:{round_}-{writer}" for writer in range(WRITERS)]
            names += fresh
            writers = [Process(gpu_node, gpu_node.uuids[0], name, SLOW) for name in fresh]
            for writer in writers:
                for _ in range(r.randrange(BLOCKS_MAX)):
                    writer.next_line()
            for writer in writers:
                writer.kill()
            found = check(reader, [block((name, i), 32) for name in names for i in range(BLOCKS_MAX + 3)])

        def nothing_held() -> bool:
            stats = gpu_node.stats_of()
            return not any(stats[name] for name in ("granted", "leased", "quarantined", "commits_pending"))

        eventually(nothing_held, what="what the dead held to be free")
        assert found > ROUNDS, "some of them came to store something"
        assert gpu_node.stats_of()["counters"]["commits_failed"] > 0, "none was killed in the middle"
