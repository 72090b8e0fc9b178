"""Reads without a call against a writer that moves the same few blocks as fast as it can.

A reader that keeps the rule (the number, the fields, the copy, the number again) is never
wrong; readers that break it in one place are wrong, so the test can tell. They wait a
millisecond where the rule would have caught them, so that the writer gets in between on
every machine.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
READS_EACH = 550_000
CAUGHT_WITHIN_S = 30.0
BLOCK_BYTES = 512

COMMON = f"""
import os, select, sys, time
import numpy as np
from kvstored.mapping import Mapping
from kvstored.v1 import shm
BLOCK, SLOTS = {BLOCK_BYTES}, 5
KEYS = [bytes([i]) * 32 for i in range(1, SLOTS + 2)]
BYTES = [bytes([i]) * BLOCK for i in range(1, SLOTS + 2)]
"""

WRITER = (
    COMMON
    + """
# One block more than there are slots: whichever is withdrawn, its slot gets the bytes of the absent one at once.
from kvstore.tiers.index import TenantIndex
from kvstore.tiers.slab import sealed_memfd
index = TenantIndex("kvstored-stress", 1, 1024)
slab = sealed_memfd("kvstored-stress", 1 << 20)
memory = Mapping(slab, 1 << 20, writable=True).bytes
blocks = [np.frombuffer(b, np.uint8) for b in BYTES]
places = [memory[i * BLOCK : (i + 1) * BLOCK] for i in range(SLOTS)]
slot_of, absent, moves, chance = {}, SLOTS, 0, 1
def put(block, slot):
    places[slot][:] = blocks[block]
    index.publish(KEYS[block], (0, BLOCK, slot * BLOCK, shm.HOST, 0, 1))
    slot_of[block] = slot
for slot in range(SLOTS):
    put(slot, slot)
print(index.descriptor, index.size_bytes, slab, flush=True)
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1000):
        chance = (chance * 1103515245 + 12345) & 0x7FFFFFFF
        block = (chance >> 16) % (SLOTS + 1)
        if block == absent:
            continue
        slot = slot_of.pop(block)
        index.withdraw(KEYS[block])
        put(absent, slot)
        absent = block
    assert index.figures[0] == 1
"""
)

READER = (
    COMMON
    + """
from kvstore_client.index import IndexReader
pid, index_fd, size_bytes, slab_fd = map(int, sys.argv[1:5])
kind, reads_wanted, seconds = sys.argv[5], int(sys.argv[6]), float(sys.argv[7])
def opened(fd):
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
index = IndexReader(opened(index_fd), size_bytes)
memory = Mapping(opened(slab_fd), 1 << 20, writable=False).bytes
out = np.empty(BLOCK, np.uint8)
reads = misses = wrong = 0
numbers, raw = index.numbers, index.raw

def keeps_the_rule(key):
    entry = index.find(key)
    if entry is None:
        return False
    word, sequence, _, length, offset, _ = entry
    if length != BLOCK:
        return False  # fields of two writes
    np.copyto(out, memory[offset : offset + length])
    return numbers[word] == sequence and index.current()

def let_the_writer_in():
    select.select([], [], [], 0.001)

def checks_before_it_copies(key):
    entry = index.find(key)
    if entry is None:
        return False
    word, sequence, _, length, offset, _ = entry
    if length != BLOCK or numbers[word] != sequence:
        return False
    let_the_writer_in()
    np.copyto(out, memory[offset : offset + length])
    return True

def reads_the_number_last(key):
    # The whole slot at once, in a layout that has the number behind the fields.
    first, step = shm.HASHES.unpack(key)
    at = shm.HEADER_BYTES + (first & 1023) * shm.SLOT_BYTES
    found, _, length, offset, _, _, _ = shm.FIELDS.unpack_from(raw, at + shm.FIELDS_AT)
    let_the_writer_in()
    sequence = numbers[at >> 3]
    if found != key or length != BLOCK or sequence & 1:
        return False
    np.copyto(out, memory[offset : offset + length])
    return numbers[at >> 3] == sequence and index.current()

read = globals()[kind]
until = time.monotonic() + seconds
while reads < reads_wanted and time.monotonic() < until and (kind == "keeps_the_rule" or not wrong):
    for _ in range(200 if kind == "keeps_the_rule" else 1):
        for key, expected in zip(KEYS, BYTES):
            if read(key):
                reads += 1
                if out.tobytes() != expected:
                    wrong += 1
            else:
                misses += 1
print(reads, misses, wrong)
"""
)

Started = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Started]:
    """Starts programs that are gone after the test."""
    running: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", program, *map(str, arguments)]
        running.append(subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()


def start_writer(start: Started) -> list[str]:
    """What a reader needs: the writer's pid and descriptors."""
    writer = start(WRITER)
    assert writer.stdout is not None
    return [str(writer.pid), *writer.stdout.readline().split()]


def result(reader: "subprocess.Popen[str]", timeout_s: float) -> tuple[int, int, int]:
    """Reads accepted, reads that did not count, accepted ones with wrong bytes."""
    said, _ = reader.communicate(timeout=timeout_s)
    assert reader.returncode == 0
    reads, misses, wrong = map(int, said.split())
    return reads, misses, wrong


@pytest.mark.stress
def test_a_million_reads_that_keep_the_rule_are_never_wrong(start: Started) -> None:
    where = start_writer(start)
    readers = [start(READER, *where, "keeps_the_rule", READS_EACH, 100.0) for _ in range(2)]
    results = [result(reader, 120) for reader in readers]
    assert sum(wrong for _, _, wrong in results) == 0
    assert sum(reads for reads, _, _ in results) >= 1_000_000
    assert sum(misses for _, misses, _ in results) > 1000, "the writer hardly moved anything: this proves nothing"


@pytest.mark.stress
@pytest.mark.parametrize("kind", ["reads_the_number_last", "checks_before_it_copies"])
def test_a_reader_that_breaks_the_rule_is_caught(start: Started, kind: str) -> None:
    where = start_writer(start)
    reads, _, wrong = result(start(READER, *where, kind, 1 << 40, CAUGHT_WITHIN_S), CAUGHT_WITHIN_S + 20)
    assert wrong > 0, f"{reads} reads and none of them wrong"
