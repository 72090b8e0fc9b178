"""How long `kvstore-cli verify` waits for an SSD that cannot be read at present."""

import pytest

from kvstore.cli import upkeep


def test_an_ssd_that_was_out_of_use_from_the_beginning_is_not_waited_for() -> None:
    patience = upkeep._Patience()
    assert patience.ends("no such device", opening=False, moved=False) == "the SSD is out of use: no such device"


def test_one_that_was_in_use_is_waited_for_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patience = upkeep._Patience()
    assert not patience.ends("", opening=False, moved=True)
    for _ in range(2):
        assert not patience.ends("input/output error", opening=False, moved=False)
    assert capsys.readouterr().err == "waiting for the SSD, at most 60 s: input/output error\n"
    assert not patience.ends("", opening=False, moved=True)
    monkeypatch.setattr(upkeep, "TROUBLE_S", -1.0)
    assert "input/output error" in patience.ends("input/output error", opening=False, moved=False)


def test_one_whose_records_are_being_read_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    patience = upkeep._Patience()
    assert not patience.ends("its records are being read", opening=True, moved=False)
    assert "its records are being read" in capsys.readouterr().err
    assert patience.ends("no such device", opening=False, moved=False) == "the SSD is out of use: no such device"
