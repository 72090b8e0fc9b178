"""An engine's own Python beside the tests': a child process that calls functions of one of our modules there.

The tests run where the daemon is installed; the engine's environment needs the engine and the SDK only.
One call is one line of JSON each way. What the engine prints goes to the log.
"""

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
PATHS = [CHECKOUT / "client", CHECKOUT / "protos"]
CALL_S = 60.0
STOP_S = 10.0


def python_of(variable: str) -> Path:
    """The interpreter of an engine's environment: `$variable`, else the tests' own."""
    return Path(os.environ.get(variable) or sys.executable)


def environment() -> dict[str, str]:
    """Of an engine's process: our modules, and nothing fetched from anywhere."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("KVSTORED_")},
        "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


class EngineProcess:
    """A child that has imported one file of the tests."""

    def __init__(self, python: Path, module: Path, log: Path) -> None:
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [str(python), __file__, str(module)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=log.parent,
                env=environment(),
                text=True,
            )

    def call(self, function: str, *arguments: Any, timeout_s: float = CALL_S) -> Any:
        """What `function(*arguments)` of the module answered there."""
        from tests.conftest import wait_for_line  # the child has no pytest

        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([function, arguments]) + "\n")
        self.process.stdin.flush()
        line = wait_for_line(self.process, timeout_s)
        assert line, f"the engine's process ended with {self.process.wait(STOP_S)}:\n{self.log()}"
        answer = json.loads(line)
        assert "raised" not in answer, answer["raised"]
        return answer["answer"]

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        """Ends it: at the end of its input; by force after a deadline."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def serve(module: str) -> None:
    """In the child: answers calls until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # By its path: LMCache's package brings a `tests` of its own, which would be found instead of ours.
    spec = importlib.util.spec_from_file_location("functions", module)
    assert spec is not None
    assert spec.loader is not None
    functions = importlib.util.module_from_spec(spec)
    sys.modules["functions"] = functions
    spec.loader.exec_module(functions)
    for line in sys.stdin:
        function, arguments = json.loads(line)
        try:
            answer = {"answer": getattr(functions, function)(*arguments)}
        except BaseException:  # noqa: BLE001 (the test raises it)
            answer = {"raised": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # whatever threads an engine leaves behind


if __name__ == "__main__":
    serve(sys.argv[1])
