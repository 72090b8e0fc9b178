"""SSDs in a test's own directory, and small real file systems."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.tiers.ssd.files import FileLayer
from kvstore.tiers.ssd.format import EXTENTS, ROCKSDB
from tests.tiers.ssd.rig import Rig

MOUNT_TIMEOUT_S = 30


@pytest.fixture(params=[EXTENTS, ROCKSDB])
def layout(request: pytest.FixtureRequest) -> str:
    """A test that asks for it shows its claim of both layouts."""
    found: str = request.param
    return found


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """An SSD on the real file system of the test's directory, with one segment."""
    made = Rig(tmp_path / "ssd")
    yield made
    made.close()


@pytest.fixture
def each_rig(tmp_path: Path, layout: str) -> Iterator[Rig]:
    """The same, of each layout."""
    made = Rig(tmp_path / "ssd", layout=layout)
    yield made
    made.close()


@pytest.fixture
def open_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Opens an SSD, with a file layer of the test's own if it likes; whatever is open is closed after the test."""
    opened: list[Rig] = []

    def start(layer: FileLayer | None = None, path: Path | None = None, writers: int = 2, layout: str = EXTENTS) -> Rig:
        opened.append(Rig(path or tmp_path / "ssd", layer, writers=writers, layout=layout))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def run(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=MOUNT_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts an ext4 image on a loop device (made where it is missing), or a ramfs: `mount("name", kind="ext4")`."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a file system")
    mounted: list[Path] = []

    def make(name: str, kind: str = "ext4", size_bytes: int = 64 << 20) -> Path:
        where, image = tmp_path / name, tmp_path / f"{name}.img"
        where.mkdir()
        if kind == "ext4":
            if not image.exists():
                with image.open("wb") as file:
                    file.truncate(size_bytes)
                run("mkfs.ext4", "-q", "-m", "0", image)
            run("mount", "-o", "loop", image, where)
        else:
            run("mount", "-t", kind, "none", where)
        mounted.append(where)
        return where

    yield make
    for where in reversed(mounted):
        # A test that failed with files open there must leave no mount behind, for others to trip over.
        run("umount", "--lazy", where)
