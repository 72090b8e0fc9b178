"""Builds the wheel and tries it as its users will: `make wheel-check`.

Three fresh virtual environments in a temporary directory:

  base             the SDK alone: imports; the programs say which extra they need
  protobuf 6       `wheel[daemon]` with protobuf 6.33.*: a daemon, a put and a get, a clean stop
  protobuf 7       the same with protobuf 7 or later: the generated code must run under both

Every wait has a deadline. Only processes started here are ended, and the directory is removed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
BUILD_S = 120.0
INSTALL_S = 300.0
PROGRAM_S = 30.0
READY_S = 30.0
STOP_S = 15.0
POLL_S = 0.05

ROUND_TRIP = """
import os, sys
from kvstore_client import Client

block_bytes, count = 1 << 16, 4
client = Client(sys.argv[1])
assert client.health().healthy
namespace = client.raw_namespace("wheel-check", block_bytes=block_bytes)
keys = [namespace.key(b"block-%d" % i) for i in range(count)]
blocks = [os.urandom(block_bytes) for _ in range(count)]
assert namespace.match(keys).blocks == 0
result = namespace.put(keys, blocks)
assert (result.stored, result.existing, result.rejected) == (count, 0, 0), result
assert namespace.match(keys).blocks == count
assert namespace.get(keys) == blocks
out = bytearray(block_bytes * count)
assert namespace.get_into(keys, out) == count
assert bytes(out) == b"".join(blocks)
client.close()
"""

READY = """
import sys
from kvstore_client import Client

with Client(sys.argv[1]) as client:
    sys.exit(0 if client.health().healthy else 3)
"""


def say(line: str) -> None:
    print(line, flush=True)


def environment(runtime_dir: Path) -> dict[str, str]:
    """Ours, without what would let an environment find this checkout or another daemon."""
    dropped = ("KVSTORED_", "PYTHON", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"XDG_RUNTIME_DIR": str(runtime_dir), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def run(command: list[str], cwd: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(cwd),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def must(command: list[str], cwd: Path, timeout_s: float) -> str:
    done = run(command, cwd, timeout_s)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(scratch: Path) -> Path:
    say("building the wheel ...")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(scratch), str(CHECKOUT)]
    must(command, scratch, BUILD_S)
    (wheel,) = scratch.glob("kvstored-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"kvstore", "kvstore_client", "kvstored", "kvstored_cuda"}, (
        f"unexpected at the top of the wheel: {sorted(tops)}"
    )
    for needed in (
        "kvstore_client/py.typed",
        "kvstored_cuda/paged.cu",
        "kvstored/v1/kvstore_pb2.py",
        "kvstored/v1/kvstore_pb2.pyi",
    ):
        assert needed in names, f"{needed} is missing from the wheel"
    assert any(name.endswith("licenses/LICENSE") for name in names), "the licence is missing from the wheel"
    say(f"  {wheel.name}, {wheel.stat().st_size / 1024:.0f} KiB, {len(names)} files")
    return wheel


def fresh_environment(scratch: Path, name: str, requirements: list[str]) -> Path:
    """A new virtual environment with `requirements`; returns its bin directory."""
    say(f"{name}: installing {' '.join(requirements)} ...")
    home = scratch / name.replace(" ", "-")
    home.mkdir(mode=0o700)
    venv.create(home / "venv", with_pip=True)
    programs = home / "venv" / "bin"
    must([str(programs / "python"), "-m", "pip", "install", "--quiet", *requirements], home, INSTALL_S)
    must([str(programs / "python"), "-m", "pip", "check"], home, PROGRAM_S)
    return programs


def check_base(scratch: Path, wheel: Path) -> None:
    programs = fresh_environment(scratch, "base", [str(wheel)])
    must([str(programs / "python"), "-c", "import kvstore_client; kvstore_client.Client"], scratch, PROGRAM_S)
    say("base: `import kvstore_client` works")
    for program in ("kvstored", "kvstore-cli"):
        done = run([str(programs / program)], scratch, PROGRAM_S)
        output = done.stdout + done.stderr
        assert done.returncode != 0, f"{program} without its extra ended with 0:\n{output}"
        assert "kvstored[daemon]" in output, f"{program} does not name the extra it needs:\n{output}"
        assert "Traceback" not in output, f"{program} ends with a traceback:\n{output}"
        say(f"base: `{program}` ends with {done.returncode} and names kvstored[daemon]")


def wait_until_ready(daemon: subprocess.Popen[str], python: str, endpoint: str, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while run([python, "-c", READY, endpoint], log.parent, PROGRAM_S).returncode != 0:
        try:
            status: int | None = daemon.wait(POLL_S)
        except subprocess.TimeoutExpired:
            status = None
        assert status is None, f"kvstored ended at its start with {status}:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"kvstored was not ready after {READY_S:.0f} s:\n{log.read_text()}"


def stop(daemon: subprocess.Popen[str], log: Path) -> None:
    daemon.terminate()
    try:
        status = daemon.wait(STOP_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"kvstored did not end within {STOP_S:.0f} s of SIGTERM:\n{log.read_text()}") from None
    assert status == 0, f"kvstored ended with {status} on SIGTERM:\n{log.read_text()}"


def check_daemon(scratch: Path, wheel: Path, name: str, protobuf: str) -> None:
    programs = fresh_environment(scratch, name, [f"{wheel}[daemon]", protobuf])
    python, home = str(programs / "python"), programs.parents[1]
    version = must([python, "-c", "import google.protobuf as p; print(p.__version__)"], home, PROGRAM_S).strip()
    endpoint, log = f"unix://{home}/kvstored/kvstored.sock", home / "kvstored.log"
    with log.open("w") as output:
        daemon = subprocess.Popen(
            [str(programs / "kvstored"), "--set", "host.size=64MiB"],
            cwd=home,
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        wait_until_ready(daemon, python, endpoint, log)
        must([python, "-c", ROUND_TRIP, endpoint], home, PROGRAM_S)
        say(f"{name}: put and get are byte-exact (protobuf {version})")
        stats = must([str(programs / "kvstore-cli"), "stats", "--json", "--endpoint", endpoint], home, PROGRAM_S)
        assert isinstance(json.loads(stats), dict), f"`kvstore-cli stats --json` is no JSON object:\n{stats}"
        say(f"{name}: `kvstore-cli stats --json` parses")
        stop(daemon, log)
        say(f"{name}: SIGTERM ends kvstored with 0")
    finally:
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait()


def main() -> int:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvstored-wheel-") as scratch_name:
        scratch = Path(scratch_name)
        try:
            wheel = build_wheel(scratch)
            check_base(scratch, wheel)
            check_daemon(scratch, wheel, "protobuf 6", "protobuf==6.33.*")
            check_daemon(scratch, wheel, "protobuf 7", "protobuf>=7")
        except (AssertionError, subprocess.TimeoutExpired) as failure:
            say(f"FAILED: {failure}")
            say("wheel-check: failed")
            return 1
    say(f"wheel-check: ok, 3 environments, {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
