"""Another process that owns a segment of the device, as the daemon does: `python -m bench.gpu.exporter UUID BYTES`.

It writes one line, the handle and its own life in hex, and keeps the segment until its input ends.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bench.gpu.rig import Rig
from kvstored_cuda.devices import Generation, Handle, HandleKind, Mapping
from kvstored_cuda.devices.discovery import device_of


def main(uuid: str, size_bytes: int) -> None:
    device = device_of(uuid)
    segment = device.allocate(size_bytes, HandleKind.IPC)
    print(segment.handle.to_bytes().hex(), device.generation.to_bytes().hex(), flush=True)
    sys.stdin.read()
    segment.free()
    device.close()


@contextmanager
def exported(rig: Rig, size_bytes: int) -> Iterator[Mapping]:
    """A segment of another process, opened here."""
    command = [sys.executable, "-m", "bench.gpu.exporter", rig.uuid, str(size_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            handle, generation = (bytes.fromhex(part) for part in process.stdout.readline().split())
            mapping = rig.device.open(Handle.from_bytes(handle), Generation.from_bytes(generation))
            try:
                yield mapping
            finally:
                rig.stream.synchronize(30)
                mapping.close()
        finally:
            process.stdin.close()
            process.wait(30)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
