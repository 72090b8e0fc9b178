"""A kvstored whose disk does as a test says: `python -m tests.faults.faulty_disk RULES LIMITS [arguments of kvstored]`.

RULES is a file of JSON that is read anew whenever it changes: what becomes of each call of the
file layer, by its name ("read", "write", "sync", "allocate", "free_bytes", ... or "*"):

    {"write": {"delay_s": 0.2}}                      it takes longer
    {"read": {"errno": 5}}                           it fails
    {"write": {"errno": 5, "after_bytes": 8192}}     the same, when so much of it has gone
    {"read": {"at_most": 4096}}                      fewer bytes move than were asked for
    {"read": {"hangs": true}}                        it ends when the rule does
    {"read": {"hangs": "begun"}}                     the same for those that hang already, and no others
    {"records": {"errno": 5}}                        reading records from the catalogue fails behind the first few
    {"records": {"corrupt": true}}                   they cannot be read, now or later
    {"names": {"bug": true}}                         it meets an error of our own
    {"commits": {"corrupt": true}}                   RocksDB says once that the catalogue is corrupt
    {"unlink": {"errno": 5, "name": "segment-", "but": 1}}   only where a name begins so, and not the first time

LIMITS is JSON: names of limits of the daemon and their values, `{"movement.SILENT_WRITE_S": 0.5}`.
"""

import contextlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kvstore import daemon
from kvstore.cli.daemon import main
from kvstore.core import movement
from kvstore.moving import drops, life, mover, removals
from kvstore.server import removing
from kvstore.tiers.ssd import catalogue, faults
from kvstore.tiers.ssd.directory import SsdDirectory
from kvstore.tiers.ssd.files import FileLayer
from tests.conftest import RunningDaemon

LOOK_S = 0.01
SAVE_S, CLOSE_S = 2.0, 1.0
"""Of a daemon that stops."""

RECORDS = 16
PROBE_S = 0.3
"""Instead of what it is: most tests are not about how soon the tier is tried again."""

CALLS = (
    "open",
    "close",
    "allocate",
    "truncate",
    "stat",
    "sync",
    "sync_directory",
    "unlink",
    "rename",
    "names",
    "free_bytes",
    "physical_bytes",
)
"""Those that rules may name, besides `read` and `write`."""


class Rules:
    """The file, as it is now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = (0, 0)
        self._told: set[str] = set()
        self._passed: dict[str, int] = {}
        self._rules: dict[str, dict[str, Any]] = {}

    def of(self, call: str) -> dict[str, Any]:
        found = self._path.stat()
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp != self._stamp:
            self._rules = json.loads(self._path.read_text())
            self._stamp = stamp
            self._told.clear()
            self._passed.clear()
        return self._rules.get(call) or self._rules.get("*") or {}

    def meant(self, call: str, rule: dict[str, Any], path: str) -> bool:
        """Whether the rule is about this call."""
        if not Path(path).name.startswith(rule.get("name", "")):
            return False
        passed = self._passed[call] = self._passed.get(call, 0) + 1
        return passed > int(rule.get("but", 0))

    def once(self, call: str, what: str) -> bool:
        """Whether its rule says so, and this is the first call since it does."""
        if not self.of(call).get(what) or call in self._told:
            return False
        self._told.add(call)
        return True


class FaultyLayer(FileLayer):
    """The file layer under rules."""

    def __init__(self, path: Path) -> None:
        self.rules = Rules(path)
        self._never = threading.Event()
        for call in CALLS:
            setattr(self, call, partial(self._obey, call, getattr(self, call)))

    def _meet(self, call: str) -> dict[str, Any]:
        """Waits as long as the call's rule says; answers it."""
        rule = self.rules.of(call)
        self._never.wait(rule.get("delay_s", 0.0))
        if rule.get("hangs") != "begun":
            while rule.get("hangs"):
                self._never.wait(LOOK_S)
                rule = self.rules.of(call)
        return rule

    def _obey(self, name: str, call: Any, *arguments: Any) -> Any:
        rule = self._meet(name)
        if rule.get("bug"):
            raise RuntimeError("of a test's")
        if "errno" in rule and self.rules.meant(name, rule, str(arguments[0]) if arguments else ""):
            raise OSError(rule["errno"], os.strerror(rule["errno"]))
        return call(*arguments)

    def read(self, descriptor: int, view: memoryview, offset: int) -> int:
        return self._bytes("read", super().read, descriptor, view, offset)

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        return self._bytes("write", super().write, descriptor, view, offset)

    def _bytes(self, name: str, call: Any, descriptor: int, view: memoryview, offset: int) -> int:
        rule = self._meet(name)
        if "errno" in rule:
            part = rule.get("after_bytes", 0)
            if part:
                call(descriptor, view[:part], offset)
            raise OSError(rule["errno"], os.strerror(rule["errno"]))
        moved: int = call(descriptor, view[: rule.get("at_most", len(view))], offset)
        return moved


class FaultyDaemon(RunningDaemon):
    """A daemon with such a disk."""

    def __init__(self, directory: Path, settings: dict[str, str], limits: dict[str, float] | None = None) -> None:
        self._limits = limits or {}
        self._rules = directory / "rules"
        self.ssd = directory / "ssd"
        self.disk()
        super().__init__(directory, {"ssd.path": str(self.ssd), **settings})

    def disk(self, **rules: dict[str, Any]) -> None:
        """From now on the disk does this, and nothing else; "*" is said as `any`."""
        text = json.dumps({"*" if name == "any" else name: rule for name, rule in rules.items()})
        fresh = self._rules.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(self._rules)

    def command(self) -> list[str]:
        script = [sys.executable, "-m", "tests.faults.faulty_disk", str(self._rules), json.dumps(self._limits)]
        return [*script, *super().command()[1:]]


def few_records(rules: Rules, read: Any) -> Any:
    """Reads RECORDS at a time, and fails behind them as the rule says."""
    calls = 0

    def next_records(db: Any, start: bytes, batch: int) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1 and rules.of("records").get("errno"):
            calls = 0
            raise faults.CatalogueError("of a test's")
        if calls > 1 and rules.of("records").get("corrupt"):
            calls = 0
            raise faults.Unreadable("Corruption: of a test's")
        return read(db, start=start, batch=RECORDS)

    return next_records


def corrupt_commits(rules: Rules, write: Any) -> Any:
    """What RocksDB says when a table that it needs is corrupt."""

    def write_batch(self: catalogue.Catalogue, batch: Any) -> None:
        if rules.once("commits", "corrupt"):
            raise faults.Unreadable("Corruption: of a test's")
        write(self, batch)

    return write_batch


@contextlib.contextmanager
def faulty(limits: dict[str, float] | None = None, **settings: str) -> Iterator[FaultyDaemon]:
    """A daemon with such a disk and little memory, its SSD open, and gone afterwards: `faulty(host__size="8MiB")`."""
    with tempfile.TemporaryDirectory(prefix="kvstored-test-") as directory:
        found = {"host.size": "8MiB", "ssd.size": "64MiB", "ssd.free_floor": "1MiB"}
        found.update((key.replace("__", "."), value) for key, value in settings.items())
        started = FaultyDaemon(Path(directory), found, limits)
        try:
            yield started
        finally:
            started.kill()


if __name__ == "__main__":
    layer, limits = FaultyLayer(Path(sys.argv.pop(1))), json.loads(sys.argv.pop(1))
    daemon.SAVE_S, life.CLOSE_S = SAVE_S, CLOSE_S
    movement.PROBE_S = life.OPEN_AGAIN_S = drops.FIRST_S = PROBE_S
    modules = {"movement": movement, "life": life, "removals": removals, "removing": removing}
    for name, value in limits.items():
        module, _, limit = name.partition(".")
        assert hasattr(modules[module], limit), name
        setattr(modules[module], limit, value)
    setattr(catalogue.Catalogue, "_write_batch", corrupt_commits(layer.rules, catalogue.Catalogue._write_batch))  # noqa: B010
    catalogue._next_records = few_records(layer.rules, catalogue._next_records)
    setattr(mover, "SsdDirectory", partial(SsdDirectory, layer=layer))  # noqa: B010 (no name that it exports)
    main(prog_name="kvstored")
