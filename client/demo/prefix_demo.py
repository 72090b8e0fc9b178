"""A prefix computed by one process, reused by another: `make demo`.

Starts a daemon of its own (in a temporary runtime directory, so that a daemon of the user's is
not disturbed), then two engine processes one after the other, prints what the second one saved,
and leaves nothing running. Exit status: 0, or 1 if anything is not as it should be.

`prefix_demo.py ROLE ENDPOINT` is how it calls itself for the two engine processes.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

READY_S = 30.0
ROLE_S = 50.0
STATS_S = 10.0
STOP_S = 10.0
POLL_S = 0.05

DAEMON = Path(sys.executable).with_name("kvstored")
CLI = Path(sys.executable).with_name("kvstore-cli")
Process = subprocess.Popen[str]


class DemoError(Exception):
    """The demo cannot go on; the message says what to do next."""


def say(line: str = "") -> None:
    print(line, flush=True)


def _stop(process: Process) -> None:
    """Ends a process that was started here: politely; by force after a deadline or at a second Ctrl-C."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    except BaseException:
        process.kill()
        raise


def _environment(runtime_dir: Path) -> dict[str, str]:
    """The user's own, without settings for the user's own daemon."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORED_")}
    environment["XDG_RUNTIME_DIR"] = str(runtime_dir)
    environment["HF_HUB_OFFLINE"] = "1"
    environment["TRANSFORMERS_VERBOSITY"] = "error"
    return environment


def _log_tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-15:]
    return "\n".join(["its last lines:", *(f"  | {line}" for line in lines)]) if lines else "it printed nothing"


def _listens(path: Path) -> bool:
    """Whether somebody takes connections there: a client would tell its user that nobody does."""
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def _wait_until_healthy(daemon: Process, path: Path, log: Path) -> None:
    """Polls until the daemon answers that it is well."""
    from kvstore_client import Client

    deadline = time.monotonic() + READY_S
    answer = "nobody listens yet"
    while True:
        if _listens(path):
            with Client(f"unix://{path}") as client:
                health = client.health()
            if health.healthy:
                return
            answer = "; ".join(health.problems)
        try:
            status: int | None = daemon.wait(POLL_S)
        except subprocess.TimeoutExpired:
            status = None
        if status is not None:
            raise DemoError(f"kvstored ended at its start with status {status}; {_log_tail(log)}")
        if time.monotonic() > deadline:
            raise DemoError(f"kvstored was not ready after {READY_S:.0f} s ({answer}); {_log_tail(log)}")


@contextmanager
def _running_daemon(runtime_dir: Path) -> Iterator[str]:
    """A daemon with its defaults; yields its endpoint."""
    for program in (DAEMON, CLI):
        if not program.exists():
            raise DemoError(f"{program} does not exist: run `make install`, then `make demo` again")
    say("starting kvstored ...")
    start = time.monotonic()
    log = runtime_dir / "kvstored.log"
    path = runtime_dir / "kvstored" / "kvstored.sock"
    with log.open("w") as output:
        daemon = subprocess.Popen(  # noqa: S603
            [str(DAEMON)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(runtime_dir),
            cwd=runtime_dir,
            process_group=0,  # Ctrl-C is for this process, which ends the others in order
            text=True,
        )
    try:
        _wait_until_healthy(daemon, path, log)
        say(f"  ready after {time.monotonic() - start:.1f} s (pid {daemon.pid})")
        yield f"unix://{path}"
        if daemon.poll() is not None:
            raise DemoError(f"kvstored ended during the demo with status {daemon.returncode}; {_log_tail(log)}")
    finally:
        _stop(daemon)
    if daemon.returncode != 0:
        raise DemoError(f"kvstored did not stop cleanly (status {daemon.returncode}); {_log_tail(log)}")
    say("kvstored stopped")


def _run_engine(role: str, endpoint: str, runtime_dir: Path) -> dict[str, Any]:
    """Runs one engine process to its end; returns what it measured."""
    engine = subprocess.Popen(  # noqa: S603
        [sys.executable, str(Path(__file__).resolve()), role, endpoint],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=_environment(runtime_dir),
        process_group=0,
        text=True,
    )
    try:
        output, _ = engine.communicate(timeout=ROLE_S)
    except subprocess.TimeoutExpired:
        raise DemoError(
            f"the {role} process did not end within {ROLE_S:.0f} s: is the machine busy? Run `make demo` again"
        ) from None
    finally:
        _stop(engine)
    if engine.returncode != 0:
        raise DemoError(
            f"the {role} process failed with status {engine.returncode}; its message stands above. "
            "If a module is missing, run `make install`; else see that `make test` passes"
        )
    report: dict[str, Any] = json.loads(output)
    return report


def _show_stats(endpoint: str, runtime_dir: Path) -> None:
    command = [str(CLI), "stats", "--endpoint", endpoint]
    try:
        done = subprocess.run(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=_environment(runtime_dir),
            text=True,
            timeout=STATS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DemoError(f"`{' '.join(command)}` did not answer within {STATS_S:.0f} s") from None
    if done.returncode != 0:
        raise DemoError(f"`{' '.join(command)}` failed with status {done.returncode}: {done.stderr.strip()}")
    say(f"$ kvstore-cli stats --endpoint {endpoint}")
    say(done.stdout.rstrip())


def _median_and_first(times_s: list[float]) -> str:
    return f"{median(times_s) * 1e3:7.1f} ms   (median of {len(times_s)}; first {times_s[0] * 1e3:.1f} ms)"


def _show_figures(cold: dict[str, Any], hit: dict[str, Any]) -> None:
    rows = [
        ("TTFT, prompt computed (process 1)", _median_and_first(cold["ttfts_s"])),
        ("TTFT, prefix fetched (process 2)", _median_and_first(hit["ttfts_s"])),
        ("  of it match and fetch", _median_and_first(hit["fetches_s"])),
        ("ratio of the medians", f"{median(cold['ttfts_s']) / median(hit['ttfts_s']):.1f}x"),
        ("KV cache stored", f"{cold['bytes'] / 2**20:.1f} MiB in {cold['put_s'] * 1e3:.1f} ms"),
        ("blocks hit", f"{hit['blocks']} of {cold['blocks']}"),
        ("same bytes", "yes" if hit["digest"] == cold["digest"] else "NO"),
        ("same next token", "yes" if hit["token"] == cold["token"] else "NO"),
    ]
    width = max(len(name) for name, _ in rows)
    say()
    for name, value in rows:
        say(f"  {name:<{width}}  {value}")
    say()


def _faults(cold: dict[str, Any], hit: dict[str, Any]) -> list[str]:
    """What is not as it should be; empty if the demo succeeded."""
    faults = []
    if cold["found_before"]:
        faults.append(f"{cold['found_before']} blocks were there before process 1 stored any")
    if cold["stored"] != cold["blocks"]:
        faults.append(f"process 1 stored {cold['stored']} of {cold['blocks']} blocks")
    if hit["blocks"] != cold["blocks"]:
        faults.append(f"process 2 found {hit['blocks']} of {cold['blocks']} blocks")
    elif hit["digest"] != cold["digest"]:
        faults.append("process 2 fetched other bytes than process 1 stored")
    if hit["token"] != cold["token"]:
        faults.append(f"the next token is {cold['token']} in process 1 and {hit['token']} in process 2")
    return faults


def _demo(runtime_dir: Path) -> None:
    with _running_daemon(runtime_dir) as endpoint:
        say("process 1: computes the prompt and stores its KV cache ...")
        cold = _run_engine("cold", endpoint, runtime_dir)
        say("process 2: asks for the same prompt ...")
        hit = _run_engine("hit", endpoint, runtime_dir)
        _show_stats(endpoint, runtime_dir)
        _show_figures(cold, hit)
    faults = _faults(cold, hit)
    if faults:
        raise DemoError("; ".join(faults) + ". This is a fault of the store: see whether `make test` passes")


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run_role(role: str, endpoint: str) -> int:
    import engine

    print(json.dumps(engine.ROLES[role](endpoint)), flush=True)
    return 0


def main(arguments: list[str]) -> int:
    if arguments:
        role, endpoint = arguments
        return _run_role(role, endpoint)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    runtime_dir = Path(tempfile.mkdtemp(prefix="kvstored-demo-"))  # 0700
    try:
        _demo(runtime_dir)
    except DemoError as failure:
        say(f"demo failed: {failure}")
        return 1
    except ImportError as error:
        say(f"demo failed: {error}: run `make install`, then `make demo` again")
        return 1
    except KeyboardInterrupt:
        say("interrupted; nothing is left running")
        return 130
    finally:
        shutil.rmtree(runtime_dir, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
