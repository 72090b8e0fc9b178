"""The script of docs/gpu.md runs as it stands there."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import RunningDaemon

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
DEVICES = "HOST-1=1073741824"


def test_the_script_of_the_page_stores_and_loads_what_it_says(
    start_daemon: Callable[..., RunningDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text().partition("## Without a GPU")[2]
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    assert DEVICES in page
    monkeypatch.setenv("KVSTORED_HOST_DEVICES", DEVICES)
    daemon = start_daemon(gpu__size="64MiB")
    environment = os.environ | {"KVSTORED_ENDPOINT": daemon.endpoint}
    command = [sys.executable, "-c", found[1]]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert not ran.returncode, ran.stderr
    assert "stored=8" in ran.stdout
    assert "\n8 [" in ran.stdout
