"""What becomes of a client whose daemon is killed while it copies from the daemon's pool, again and again.

`python -m bench.gpu.death ENDPOINT UUID` is the client: it says "copying" when it does, and after that goes on for
AFTER_S with the blocks that it holds. If it faults, memory exported as descriptors has to be the default.
"""

import subprocess
import sys
import time

from bench.gpu.copies import BLOCK, WITHIN, engine
from bench.gpu.rig import WAIT_S, Rig, open_rig
from bench.gpu.store import TIMEOUT_S, node
from kvstore_client import Client
from kvstore_client.paged import PagedKV
from kvstored_cuda.devices.errors import DeviceError

BEFORE_S, AFTER_S = 1.0, 3.0
BLOCKS = 16


def killed_while_copying(rig: Rig, quick: bool) -> str:
    """One line that says what the client met."""
    with node(quick) as daemon:
        command = [sys.executable, "-m", "bench.gpu.death", daemon.endpoint, rig.uuid]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as client:
            assert client.stdout is not None
            said = [client.stdout.readline()]
            if said[0].strip() == "copying":
                try:
                    client.wait(BEFORE_S)
                except subprocess.TimeoutExpired:
                    daemon.process.kill()
            said += client.stdout.read().splitlines()
            client.wait(WAIT_S)
    ended = f"status {client.returncode}" if client.returncode else "went on"
    told = next((line for line in reversed(said) if "rounds" in line), said[-1] if said else "it said nothing")
    return f"{ended}: {told.strip()}"


def main(endpoint: str, uuid: str) -> None:
    rig = open_rig(uuid)
    own = rig.device.allocate(BLOCKS * BLOCK)
    client = Client(endpoint, name="gpu-death", timeout_s=TIMEOUT_S)
    ns = client.raw_namespace("gpu-death", BLOCK)
    keys = [ns.key(f"block {n}".encode()) for n in range(BLOCKS)]
    kv = PagedKV.of_layout(engine(own.address, BLOCKS), f"gpu:{uuid}")
    assert ns.put(keys, kv.blocks(list(range(BLOCKS)), stream=rig.stream)).stored == BLOCKS
    with ns.acquire(keys, TIMEOUT_S, to=f"gpu:{uuid}") as lease:
        assert len(lease) == BLOCKS, f"{len(lease)} blocks are held"
        addresses = lease.addresses
        print("copying", flush=True)
        until, copies, away = time.monotonic() + BEFORE_S + AFTER_S, 0, 0
        try:
            while time.monotonic() < until:
                for n, address in enumerate(addresses):
                    rig.device.copy(own.address + n * BLOCK, address, BLOCK, WITHIN, rig.stream)
                rig.stream.synchronize(WAIT_S)
                copies += 1
                away += not client.health().reachable
        except DeviceError as e:
            print(f"after {copies} rounds, {away} of them without a daemon: {type(e).__name__}: {e}", flush=True)
            raise SystemExit(1) from e
    print(f"{copies} rounds of 16 copies, {away} of them without a daemon, none failed", flush=True)
    client.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
