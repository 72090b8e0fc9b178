"""Huge pages and memory that outlives the daemon: pages of the daemon before are not free, and are this one's."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.config import Host
from kvstore.errors import ConfigError, StartupError
from kvstore.tiers.slab import sealed_memfd
from kvstore.warm import choose_pages
from tests.nodes import running

HUGE = 2 << 20


@pytest.fixture
def kept() -> Iterator[dict[str, int]]:
    """Ten segments of one huge page each, none of which takes a page as long as nobody maps it; and their rows."""
    made = {f"segment-{n}": sealed_memfd("kvstored-test", HUGE, huge_pages=True) for n in range(10)}
    made |= {"rows-1": sealed_memfd("kvstored-test", HUGE), "segment-99": sealed_memfd("kvstored-test", HUGE)}
    yield made
    for descriptor in made.values():
        os.close(descriptor)


def proc_with(tmp_path: Path, total: int, free: int) -> Path:
    (tmp_path / "meminfo").write_text(
        f"HugePages_Total: {total}\nHugePages_Free: {free}\nHugePages_Rsvd: 0\nHugepagesize: 2048 kB\n"
    )
    return tmp_path


def host(huge_pages: str, pages: int) -> Host:
    return Host.model_validate({"size": f"{2 * pages}MiB", "huge_pages": huge_pages, "persist": "fdstore"})


def test_a_slab_that_is_kept_needs_no_free_pages(tmp_path: Path, kept: dict[str, int]) -> None:
    """ "on" was refused at the first restart, and "auto" threw away all that was kept."""
    assert choose_pages(host("on", 10), kept, proc=proc_with(tmp_path, 10, 0))
    assert choose_pages(host("on", 12), kept, proc=proc_with(tmp_path, 12, 2))


def test_what_is_missing_must_be_free(tmp_path: Path, kept: dict[str, int]) -> None:
    proc = proc_with(tmp_path, 12, 1)
    with pytest.raises(StartupError, match=r"host\.huge_pages: .* and 1 are free"):
        choose_pages(host("on", 12), kept, proc=proc)
    with pytest.raises(ConfigError):
        choose_pages(host("on", 50), kept, proc=proc)
    with pytest.raises(ConfigError):
        choose_pages(host("on", 10), {}, proc=proc_with(tmp_path, 0, 0))
    assert not choose_pages(host("off", 10), kept, proc=proc)


def test_huge_pages_in_a_tmpfs_directory_are_refused(tmp_path: Path) -> None:
    """By name, and before anything is made there. "auto" does not ask for them."""
    place = Path("/dev/shm") / f"kvstored-test-{os.getpid()}"
    daemon = running(host__persist=str(place), host__size="4MiB", host__huge_pages="on")
    with (
        pytest.raises(AssertionError, match=r"ended with 2:(.|\n)*host.huge_pages: files of .* have no huge pages"),
        daemon,
    ):
        pass
    assert not place.exists()
