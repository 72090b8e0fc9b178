"""The kernels' source, run by the CPU, against their twin in numpy, on engines and calls drawn at random."""

from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings

from kvstored_cuda.devices import Stream
from kvstored_cuda.plans import LARGE_ENTRIES, SMALL_ENTRIES, Launch, kernel_names
from kvstored_cuda.twins import TwinCopies
from tests.cuda.device_peer import make_device
from tests.cuda.kernel_claims import agrees_with_the_twin, every_kernel
from tests.cuda.kernel_rig import Case, HostPlace, ShimCopies, World, cases, plain_shim
from tests.cuda.test_kernels_batches import small_world

END_S = 30.0


@settings(deadline=None, max_examples=300)
@given(case=cases())
def test_kernels_leave_what_their_twin_leaves(case: Case) -> None:
    agrees_with_the_twin(case, World(case, HostPlace()), lambda layout: ShimCopies(layout, plain_shim()))


@settings(deadline=None, max_examples=15)
@given(case=cases(numbers=12))
def test_kernels_leave_what_their_twin_leaves_of_larger_cases(case: Case) -> None:
    agrees_with_the_twin(case, World(case, HostPlace()), lambda layout: ShimCopies(layout, plain_shim()))


@pytest.mark.parametrize("entries_max", [SMALL_ENTRIES, 3, 5])
def test_a_copy_of_several_launches_is_the_same_copy(entries_max: int) -> None:
    """Here already two or three numbers a launch; for arguments of 4 KiB it would take hundreds of slots."""
    world = small_world()
    launched: list[Launch] = []
    made = partial(ShimCopies, library=plain_shim(), entries_max=entries_max, launched=launched)
    agrees_with_the_twin(world.case, world, made)
    assert len(launched) == 3 * (1 if entries_max == SMALL_ENTRIES else 2)


def test_every_kernel_of_the_source_leaves_what_its_twin_leaves() -> None:
    ran: set[str] = set()
    for case, gather, scatter in every_kernel():
        world = World(case, HostPlace())
        launched: list[Launch] = []
        agrees_with_the_twin(case, world, partial(ShimCopies, library=plain_shim(), launched=launched))
        assert [launch.kernel for launch in launched] == [gather, scatter, gather]
        ran |= {gather, scatter}
    assert ran == set(kernel_names(LARGE_ENTRIES))


@pytest.fixture
def stream() -> Iterator[Stream]:
    """Of a HostDevice."""
    device = make_device("host")
    yield device.stream()
    device.close()


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_the_twin_on_a_stream_copies_in_its_order(stream: Stream, case: Case) -> None:
    """What a HostDevice has for kernels."""
    world = World(case, HostPlace())
    agrees_with_the_twin(case, world, TwinCopies, lambda: stream.synchronize(END_S), stream=stream)
