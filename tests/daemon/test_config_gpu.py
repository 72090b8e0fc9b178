"""Settings of the GPU tier."""

from pathlib import Path

import pytest

from kvstore.config import Settings, describe, load
from kvstore.errors import ConfigError
from kvstored_cuda.devices.handles import UUID_BYTES_MAX, HandleKind

A, B = "GPU-11111111-2222-3333-4444-555555555555", "MIG-66666666-7777-8888-9999-000000000000"


def settings(*overrides: str) -> Settings:
    return load(None, overrides, {}).settings


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(*overrides)
    return str(caught.value)


def test_it_is_off_and_of_all_devices_by_default() -> None:
    gpu = settings().gpu
    assert (gpu.size_bytes, gpu.wanted, gpu.handles) == (0, ("all",), "ipc")


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("0", 0), ("40GiB", 40 << 30), ("1MiB", 1 << 20), ("1000001B", 0), ("10GB", 9_999_998_976)]
)
def test_its_size_is_that_of_each_device_s_pool_in_whole_pages(text: str, size_bytes: int) -> None:
    if size_bytes or text == "0":
        assert settings(f"gpu.size={text}").gpu.size_bytes == size_bytes
    else:
        assert "smaller than 1MiB; allowed: a size such as" in problem(f"gpu.size={text}")
        assert "the pool of each device; 0 is off" in problem(f"gpu.size={text}")


@pytest.mark.parametrize("written", [f"{A},{B}", f"{A}, {B}", f'["{A}", "{B}"]'])
def test_devices_are_named_by_uuids_as_text(written: str) -> None:
    assert settings(f"gpu.devices={written}").gpu.wanted == (A, B)
    assert load(None, [], {"KVSTORED_GPU__DEVICES": written}).settings.gpu.wanted == (A, B)


def test_devices_are_a_list_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstored.toml"
    file.write_text(f'[gpu]\nsize = "1GiB"\ndevices = ["{A}", "{B}"]\nhandles = "descriptor"\n')
    effective = load(file, [], {})
    assert effective.settings.gpu.wanted == (A, B)
    shown = {key: value for key, value, _ in describe(effective)}
    assert shown["gpu.devices"] == f"{A},{B}"
    assert load(None, [f"{key}={shown[key]}" for key in shown if key.startswith("gpu.")], {}).settings.gpu == (
        effective.settings.gpu
    )


@pytest.mark.parametrize("written", ["0", "0,1", "cuda:0", f"{A},1", "[0]", '["0"]'])
def test_a_device_s_number_is_refused_and_why_is_said(written: str) -> None:
    said = problem(f"gpu.devices={written}")
    assert "gpu.devices" in said
    assert 'allowed: "all", or a list of UUIDs as nvidia-smi -L shows them' in said
    if written != "[0]":
        assert "another one's with each CUDA_VISIBLE_DEVICES; name it by its UUID" in said


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("", "neither all nor a list"),
        ("[]", "neither all nor a list"),
        ("{}", "is not a UUID"),
        ('["x', "not a list of texts"),
        ("some thing", "is not a UUID"),
        (f"all,{A}", "is not a UUID"),
        (f"{A},{A}", "named twice"),
        ("GPU-" + "a" * 61, "is not a UUID"),
        (",".join(f"GPU-{number}" for number in range(65)), "more than 64"),
    ],
)
def test_what_names_no_devices_is_refused(written: str, why: str) -> None:
    assert why in problem(f"gpu.devices={written}")


def test_a_list_of_something_else_is_refused_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstored.toml"
    for value in ("0", "[0]", "true", "[]", '[["x"]]'):
        file.write_text(f"[gpu]\ndevices = {value}\n")
        with pytest.raises(ConfigError, match="list of texts"):
            load(file, [], {})


def test_the_longest_name_that_is_taken_fits_into_a_handle() -> None:
    name = "GPU-" + "a" * (UUID_BYTES_MAX - 4)
    assert settings(f"gpu.devices={name}").gpu.wanted == (name,)
    assert "is not a UUID" in problem(f"gpu.devices={name}a")


@pytest.mark.parametrize("kind", HandleKind)
def test_each_kind_of_handle_is_a_setting(kind: HandleKind) -> None:
    assert settings(f"gpu.handles={kind.name.lower()}").gpu.handles == kind.name.lower()
    assert 'allowed: "ipc" or "descriptor"' in problem("gpu.handles=fd")


def test_variables_that_name_devices_without_a_gpu_are_no_settings() -> None:
    environ = {"KVSTORED_HOST_DEVICES": "HOST-1=1000000", "KVSTORED_HOST_DEVICE_FAULTS": "open:delay=1"}
    assert load(None, [], environ).settings == Settings()
