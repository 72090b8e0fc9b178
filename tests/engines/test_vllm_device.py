"""vLLM with its KV cache on a device: blocks go through the daemon's pool there. Here the device is a HostDevice.

The engine computes on the processor as always, and counts its memory as that of the device that KVSTORED_HOST_DEVICES
names, so that all but CUDA itself is what runs on a GPU: handles, events, copies by block table, commits by event.
"""

from collections.abc import Callable

import pytest

from kvstore_client import Client
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.engines.vllm_engines import BLOCK, Engine, prompt

pytestmark = pytest.mark.timeout(600)

DEVICE = "HOST-00000000-0000-0000-0000-0000000000aa"
BLOCKS = 1000 // BLOCK


@pytest.mark.parametrize("pool", ["a pool on the device", "no pool there"])
def test_what_an_engine_stored_from_a_device_another_loads_to_it_and_has_the_same_tokens(
    start_daemon: Callable[..., RunningDaemon],
    start_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    pool: str,
) -> None:
    monkeypatch.setenv("KVSTORED_HOST_DEVICES", f"{DEVICE}={1 << 30}")
    pooled = pool == "a pool on the device"
    daemon = start_daemon(host__size="256MiB", **({"gpu__size": "128MiB"} if pooled else {}))
    asked = prompt(1000)
    first = start_engine(daemon.endpoint, fresh=True).ready()
    cold = first.generate(asked, tokens=16)
    assert cold["cached"] == [0]
    assert first.counters()["save_blocks"] == BLOCKS
    first.stop()

    second = start_engine(daemon.endpoint, fresh=True).ready()
    with Client(daemon.endpoint, name="looks") as client:
        if pooled:
            (gpu,) = client.stats()["gpus"]
            assert gpu["counters"]["committed"] == BLOCKS
            assert gpu["counters"]["commits_failed"] == 0
        hit = second.generate(asked, tokens=16)
        assert hit["tokens"] == cold["tokens"]
        assert hit["cached"] == [BLOCKS * BLOCK]
        if pooled:  # and from the slab, where its blocks are by now
            request = pb.EvictRequest(all=True, tier=pb.TIER_GPU)
            eventually(lambda: client.stats()["gpus"][0]["counters"]["copied_down"] >= BLOCKS, 10, "copies down")
            client._transport.administer("Evict", request, 10.0)
            assert client.stats()["gpus"][0]["blocks"] == 0
    third = start_engine(daemon.endpoint, fresh=True).ready()
    again = third.generate(asked, tokens=16)
    assert again["tokens"] == cold["tokens"]
    assert again["cached"] == [BLOCKS * BLOCK]
    loaded = third.counters()
    assert loaded["load_blocks"] == BLOCKS
    assert loaded["load_failures"] == 0
