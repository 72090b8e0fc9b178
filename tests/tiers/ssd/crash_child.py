"""Processes that write, overwrite and forget blocks until they are killed, and say what was acknowledged.

    python -m tests.tiers.ssd.crash_child DIRECTORY LAYOUT

For each seed on its input it forks one, which saves the imports. That one says `open PID`,
then `begin SLOT NUMBER` before block NUMBER goes to SLOT (or nothing does, NUMBER 0: it is
forgotten) and `done SLOT NUMBER` when that was acknowledged; only one job is under way for a
slot. When it has gone `gone STATUS` comes.
"""

import os
import random
import sys
from pathlib import Path

from kvstore.tiers.ssd.format import record_key
from kvstore.tiers.ssd.jobs import Forget, Forgotten, Job, Wrote
from tests.tiers.ssd.rig import SLOTS, Rig, key_of

UNDER_WAY = 6


def say(*words: object) -> None:
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


class Writer:
    """Keeps some slots of one rig busy."""

    def __init__(self, rig: Rig, chance: random.Random) -> None:
        self.rig, self.chance = rig, chance
        self.owner: dict[int, int] = {}
        for record in sorted(rig.records().values(), key=lambda record: record.sequence):
            self.owner[record.slot] = record.sequence
        self.last = max(self.owner.values(), default=0)
        self.busy: dict[int, tuple[int, int]] = {}

    def begin(self) -> None:
        slot = self.chance.choice([slot for slot in range(SLOTS) if slot not in {s for s, _ in self.busy.values()}])
        self.last += 1
        former = self.owner.pop(slot, None)
        job: Job
        if former is not None and self.chance.random() < 0.2:
            job, number = Forget(self.last, (record_key(1, key_of(former)),)), 0
        else:
            job, number = self.rig.write(self.last, slot, replaces=former), self.last
        self.busy[self.last] = (slot, number)
        say("begin", slot, number)
        self.rig.tier.submit(job)

    def end(self) -> None:
        answer = self.rig.answer()
        assert isinstance(answer, Wrote | Forgotten), answer
        assert answer.error == "", answer
        slot, number = self.busy.pop(answer.number)
        if number:
            self.owner[slot] = number
        say("done", slot, number)


def work(path: Path, layout: str, seed: int) -> None:
    rig = Rig(path, layout=layout)
    writer = Writer(rig, random.Random(seed))
    say("open", os.getpid())
    while True:
        while len(writer.busy) < UNDER_WAY:
            writer.begin()
        writer.end()


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            try:
                work(Path(sys.argv[1]), sys.argv[2], int(line))
            finally:
                os._exit(1)
        say("gone", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
