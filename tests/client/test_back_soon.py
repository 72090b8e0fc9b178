"""A daemon that is back within a second is not waited for for another."""

import socket
from pathlib import Path

from kvstore_client.keeper import AWAY_S, BACKOFF_MAX_S, Keeper

TRIES = 12


def pauses(keeper: Keeper) -> list[float]:
    """Between tries, one after the other, as the keeper's thread would make them."""
    found = []
    for _ in range(TRIES):
        keeper._retry_at = 0.0
        found.append(keeper._reconnect())
    return found


def test_while_nobody_listens_it_looks_ten_times_a_second(tmp_path: Path) -> None:
    """To be refused costs next to nothing; by the back-off it was up to a second late."""
    keeper = Keeper(str(tmp_path / "nobody"), "", "default", 1.0, False)
    try:
        assert max(pauses(keeper)) == AWAY_S
    finally:
        keeper.close()


def test_one_that_does_not_answer_is_left_in_peace(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen(64)
        keeper = Keeper(str(tmp_path / "silent"), "", "default", 0.01, False)
        try:
            assert BACKOFF_MAX_S in pauses(keeper)[-3:], "its own thread may have tried just before one of them"
        finally:
            keeper.close()
