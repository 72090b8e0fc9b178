"""vLLM, prefill and decode apart: what one engine has computed of a prompt, another decodes from without a prefill."""

from collections.abc import Callable

import pytest

from tests.conftest import RunningDaemon
from tests.engines.vllm_engines import BLOCK, Engine, prompt

Start = Callable[..., Engine]

pytestmark = pytest.mark.timeout(600)
"""Engines take their time to start on a machine that does other things."""

ASKED = {"do_remote_decode": True}
HANDOFF_S = 2.0
"""How long a decode engine waits for what was promised: handoff.py."""


def test_a_decode_engine_goes_on_where_a_prefill_engine_ended(daemon: RunningDaemon, start_engine: Start) -> None:
    prefill = start_engine(daemon.endpoint, role="kv_producer")
    decode = start_engine(daemon.endpoint, role="kv_consumer")
    alone = start_engine(None)
    lengths = (1000, 3 * BLOCK, 50, 4 * BLOCK + 1)
    alone.ready()
    expected = {n: alone.generate(prompt(n, seed=n), tokens=12)["tokens"] for n in lengths}
    alone.stop()
    prefill.ready()
    decode.ready()
    for n in lengths:
        asked = prompt(n, seed=n)
        told = prefill.generate(asked, tokens=1, params=ASKED)["params"][0]
        assert (told["do_remote_prefill"], told["stored_tokens"]) == (True, n)
        # The router does not wait for the prefill engine to have stored it all.
        decode.ask("generate", prompts=[asked], tokens=12, params=told)
        prefill.counters()
        came = decode.answer()
        assert came["tokens"] == expected[n]
    counted = decode.counters()
    assert counted["lookup_tokens"] == sum(lengths), "nothing was left to compute but what gives the next token"
    assert counted["load_blocks"] == sum(-(-n // BLOCK) for n in lengths)
    assert (counted["load_failures"], counted.get("save_blocks", 0)) == (0, 0), "a consumer stores nothing"
    assert prefill.counters()["load_blocks"] == 0


def test_a_decode_engine_computes_what_never_came(daemon: RunningDaemon, start_engine: Start) -> None:
    decode = start_engine(daemon.endpoint, role="kv_consumer").ready()
    cold = decode.generate(prompt(1000), tokens=12)
    assert decode.do("reset", connector=False)
    promised = {"do_remote_prefill": True, "stored_tokens": 1000}
    came = decode.generate(prompt(1000), tokens=12, params=promised)
    assert came["tokens"] == cold["tokens"]
    assert HANDOFF_S <= came["ttft"][0] < 5 * HANDOFF_S, "it waited for what it was promised, and not for ever"
    assert max(decode.do("hooks").values()) < 0.1


def test_parameters_that_promise_nothing_are_a_plain_request(daemon: RunningDaemon, start_engine: Start) -> None:
    decode = start_engine(daemon.endpoint, role="kv_consumer").ready()
    for told in ({"do_remote_prefill": True, "stored_tokens": "x"}, {"do_remote_prefill": 1}, {}):
        assert decode.generate(prompt(300), params=told)["ttft"][0] < HANDOFF_S
