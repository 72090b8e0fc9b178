"""The shape of the code is tested too: import direction, sizes, forbidden calls, fresh generated code."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
PRODUCT = ("kvstore", "client", "protos/kvstored", "cuda/kvstored_cuda")
OURS = (*PRODUCT, "tests", "bench", "cuda", "docs", "systemd", ".ci")
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
SKIPPED = {".git", ".venv", ".venv-peers", ".venv-engines", "__pycache__", "build", "dist", "node_modules"}
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70


def python_files(*folders: str) -> list[Path]:
    """Our Python files below `folders`, without generated ones."""
    found = (path for folder in folders for path in sorted((CHECKOUT / folder).rglob("*.py")))
    return [path for path in found if not path.name.endswith(GENERATED) and not SKIPPED & set(path.parts)]


def name_of(path: Path) -> str:
    return str(path.relative_to(CHECKOUT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def package_of(path: Path) -> str:
    """The package that a relative import in `path` starts from."""
    parts = path.relative_to(CHECKOUT).parent.parts
    return ".".join(parts[1:] if parts[0] in ("client", "protos", "cuda") else parts)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, also inside functions and `if TYPE_CHECKING`.

    `from a import b` yields `a.b`: b may be a module.
    """
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = package_of(path).split(".")
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


IMPURE = ["asyncio", "socket", "time", "threading", "os", "random", "select", "selectors", "signal", "subprocess"]
IMPURE += ["secrets", "mmap", "fcntl", "concurrent", "multiprocessing", "pathlib", "tempfile"]
"""I/O, clocks, threads, chance: in the core these come in as arguments."""

ABOVE = ("kvstore.server", "kvstore.daemon", "kvstore.cli", "kvstore_client")

DIRECTIONS = {
    "kvstore/core": ("kvstore.tiers", "kvstore.moving", "kvstore.gpu", "kvstored_cuda", *ABOVE, *IMPURE),
    "kvstore/tiers": ("kvstore.moving", "kvstore.gpu", "kvstored_cuda", *ABOVE),
    "kvstore/moving": ("kvstore.gpu", "kvstored_cuda", *ABOVE),
    "kvstore/gpu": ("kvstore.moving", *ABOVE),
    "kvstore/server": (
        "kvstore.tiers",
        "kvstore.moving",
        "kvstore.gpu",
        "kvstore.daemon",
        "kvstore.cli",
        "kvstore_client",
    ),
    "kvstore/cli": (
        "kvstore.core",
        "kvstore.tiers",
        "kvstore.moving",
        "kvstore.gpu",
        "kvstore.server",
        "kvstored_cuda",
    ),
    "client/kvstore_client": ("kvstore",),
    "protos/kvstored": ("kvstore", "kvstore_client", "kvstored_cuda"),
    "cuda/kvstored_cuda": ("kvstore", "kvstore_client"),
}


@pytest.mark.parametrize("folder", DIRECTIONS)
def test_imports_point_downwards(folder: str) -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {name}"
        for path in python_files(folder)
        for line, name in imports_of(path)
        if within(name, DIRECTIONS[folder])
    ]
    assert not wrong, f"{folder} must not import these:\n" + "\n".join(wrong)


def test_the_import_reader_sees_every_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CHECKOUT", tmp_path)
    module = tmp_path / "kvstore" / "core" / "sample.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "import os.path\n"
        "from kvstore import tiers\n"
        "from ..server import session\n"
        "from . import block\n"
        "if TYPE_CHECKING:\n"
        "    from kvstore.daemon import Daemon\n"
        "def f():\n"
        "    import socket as s\n"
    )
    assert {name for _, name in imports_of(module)} == {
        "os.path",
        "kvstore.tiers",
        "kvstore.server.session",
        "kvstore.core.block",
        "kvstore.daemon.Daemon",
        "socket",
    }


def test_no_function_is_too_long() -> None:
    long = [
        f"{name_of(path)}:{node.lineno} {node.name}: {lines} lines"
        for path in python_files(*OURS)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not long, f"a function has at most {FUNCTION_LINES_MAX} lines:\n" + "\n".join(long)


def test_no_file_is_too_long() -> None:
    files = [*python_files(*OURS), *CHECKOUT.glob("protos/**/*.proto"), CHECKOUT / "Makefile"]
    long = [
        f"{name_of(path)}: {lines} lines"
        for path in files
        if (lines := len(path.read_text().splitlines())) > FILE_LINES_MAX
    ]
    assert not long, f"a file has at most {FILE_LINES_MAX} lines:\n" + "\n".join(long)


PICKLES = ("pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "joblib")
CODE_FROM_DATA_MODULES = (*PICKLES, "multiprocessing.connection", "multiprocessing.managers")
CODE_FROM_DATA_CALLS = {"eval", "exec", "compile", "__import__"}
CODE_FROM_DATA_ATTRIBUTES = {("yaml", name) for name in ("load", "load_all", "unsafe_load", "unsafe_load_all")} | {
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("torch", "load"),
}


def runs_data_as_code(node: ast.AST) -> str:
    """What in this call could run bytes from outside as code; "" if nothing."""
    if not isinstance(node, ast.Call):
        return ""
    called = node.func
    if isinstance(called, ast.Name) and called.id in CODE_FROM_DATA_CALLS:
        return called.id
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        pair = (called.value.id, called.attr)
        if pair in CODE_FROM_DATA_ATTRIBUTES:
            return ".".join(pair)
    if any(word.arg == "allow_pickle" for word in node.keywords):
        return "allow_pickle"
    return ""


def test_bytes_from_outside_are_never_run_as_code() -> None:
    """Deserialisers that execute what they read are remote code execution on an open socket."""
    wrong = []
    for path in python_files(*PRODUCT):
        wrong += [
            f"{name_of(path)}:{line} imports {name}"
            for line, name in imports_of(path)
            if within(name, CODE_FROM_DATA_MODULES)
        ]
        wrong += [
            f"{name_of(path)}:{getattr(node, 'lineno', 0)} calls {call}"
            for node in ast.walk(tree_of(path))
            if (call := runs_data_as_code(node))
        ]
    assert not wrong, "data stays data:\n" + "\n".join(wrong)


def test_the_scan_for_code_from_data_finds_it() -> None:
    for text in ("eval(x)", "exec(x)", "yaml.load(f)", "numpy.load(f, allow_pickle=True)", "torch.load(f)"):
        assert any(runs_data_as_code(node) for node in ast.walk(ast.parse(text))), text
    for text in ("yaml.safe_load(f)", "json.load(f)", "re.compile(x)", "model.eval()"):
        assert not any(runs_data_as_code(node) for node in ast.walk(ast.parse(text))), text


def test_tests_do_not_sleep() -> None:
    """A test that sleeps is slow or flaky: move the clock, or wait for the thing itself."""
    wrong = []
    for path in python_files("tests"):
        wrong += [f"{name_of(path)}:{line}" for line, name in imports_of(path) if name == "time.sleep"]
        wrong += [
            f"{name_of(path)}:{node.lineno}"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Attribute)
            and node.attr == "sleep"
            and isinstance(node.value, ast.Name)
            and node.value.id == "time"
        ]
    assert not wrong, "\n".join(wrong)


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    """All that lies in the checkout as generated code is what the contract generates, as `make protos` does."""
    sources = sorted(str(path.relative_to(CHECKOUT / "protos")) for path in CHECKOUT.glob("protos/**/*.proto"))
    with_service = [source for source in sources if "\nservice " in (CHECKOUT / "protos" / source).read_text()]
    for kind, named in (("python", sources), ("pyi", sources), ("grpc_python", with_service)):
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", f"--{kind}_out={tmp_path}", *named]
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    generated = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*")}
    there = {path.relative_to(CHECKOUT / "protos") for end in GENERATED for path in CHECKOUT.glob(f"protos/**/*{end}")}
    assert generated == there
    for path in generated:
        assert (CHECKOUT / "protos" / path).read_bytes() == (tmp_path / path).read_bytes(), (
            f"protos/{path} is not what the contract generates: run `make protos`"
        )


def test_the_sdk_imports_neither_torch_nor_cuda_nor_the_daemon() -> None:
    program = (
        "import sys, kvstore_client\n"
        "heavy = {'torch', 'cupy', 'transformers', 'kvstore', 'pydantic', 'click', 'rich'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, cwd=CHECKOUT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def every_file() -> Iterator[Path]:
    for folder, folders, names in os.walk(CHECKOUT):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.endswith("_cache")]
        yield from (Path(folder) / name for name in names)


def test_no_file_names_a_package_registry() -> None:
    """Where packages come from is the business of whoever installs them."""
    hosts = [
        ".".join(words)
        for words in (
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("download", "pytorch", "org"),
            ("anaconda", "org"),
            ("registry", "npmjs", "org"),
            ("static", "crates", "io"),
            ("proxy", "golang", "org"),
        )
    ]
    wrong = []
    for path in every_file():
        if path.is_file() and not path.is_symlink():
            text = path.read_bytes()
            wrong += [f"{name_of(path)} names {host}" for host in hosts if host.encode() in text]
    assert not wrong, "\n".join(wrong)
