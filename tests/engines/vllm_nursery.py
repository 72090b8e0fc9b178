"""Starts vLLM engines for tests in two seconds: a process that has imported vLLM, and forks for each of them.

An engine's start is mostly imports. What is forked has imported and nothing else: no thread, no engine, no client.
It becomes vllm_program.py, in a session of its own with the descriptors that came with the request.

    vllm_nursery.py DESCRIPTOR       serves the Unix socket of this number until its other end is closed

A request is one datagram: a configuration of vllm_program.py as JSON, with descriptors for 0, 1 and 2. The answer is
the number of the new process, with a descriptor of it, by which its end is seen.
"""

import contextlib
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

PROGRAM = Path(__file__).with_name("vllm_program.py")
IMPORT_S, END_S = 240.0, 20.0
REQUEST_MAX = 1 << 16
IMPORTED = (
    "vllm.lora.request",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "kvstore_client.connectors.vllm",
)


class Forked:
    """An engine's process, as far as it is used like one of `subprocess`; the nursery is its parent."""

    def __init__(self, pid: int, descriptor: int, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._descriptor = descriptor

    def poll(self) -> int | None:
        """None while it runs."""
        return 0 if select.select([self._descriptor], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(PROGRAM), timeout or 0.0)
        return 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._descriptor)


class Nursery:
    """The process that forks, from a test's side. It starts with the first engine."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._environment = environment
        self._log = log
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, config: str, errors: int) -> Forked:
        """An engine's process that writes to `errors`."""
        if self._socket is None:
            self._start()
        assert self._socket is not None
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        socket.send_fds(self._socket, [config.encode()], [theirs_in, theirs_out, errors])
        os.close(theirs_in)
        os.close(theirs_out)
        data, descriptors, _, _ = socket.recv_fds(self._socket, REQUEST_MAX, 1)
        assert descriptors, f"the nursery has ended:\n{self._log.read_text(errors='replace')[-4000:]}"
        return Forked(int(data), descriptors[0], open(ours_in, "wb", buffering=0), open(ours_out, "rb", buffering=0))

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(IMPORT_S)
        with self._log.open("wb") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        if self._socket is None or self._process is None:
            return
        self._socket.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(requests: socket.socket) -> None:
    """In the nursery: forks until nobody is there to ask."""
    for module in IMPORTED:
        importlib.import_module(module)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "what has threads must not fork"
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, REQUEST_MAX, 3)
        if not data:
            return
        _forget_ended()
        pid = os.fork()
        if pid == 0:
            become(data.decode(), descriptors, requests)
        for descriptor in descriptors:
            os.close(descriptor)
        # It cannot become another's number before it is waited for, which is not before the next request.
        handle = os.pidfd_open(pid)
        socket.send_fds(requests, [str(pid).encode()], [handle])
        os.close(handle)


def _forget_ended() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def become(config: str, descriptors: list[int], requests: socket.socket) -> None:
    """In the new process: the program of an engine, as if it had been started."""
    try:
        os.setsid()
        requests.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.argv = [str(PROGRAM), "run", config]
        runpy.run_path(str(PROGRAM), run_name="__main__")
    except BaseException:  # noqa: BLE001 (it ends here, whatever it is: what follows is the nursery's)
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_HOST_IP="127.0.0.1", DO_NOT_TRACK="1")
    serve(socket.socket(fileno=int(sys.argv[1])))
