"""vLLM: `KVStoreConnector`, loaded out of tree by name.

    --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvstore_client.connectors.vllm"}'

vLLM makes one connector in its scheduler and one in each worker:

    connector.py   the class vLLM knows: hands every hook on to one of the two sides
    scheduling.py  the scheduler's side: what to load, what to save, which blocks are pinned meanwhile
    hits.py        how many tokens of a prompt the store has, over ranks and groups
    groups.py      which of vLLM's cache groups can be kept
    working.py     a worker's side: loads and saves in threads of their own, and what came of them
    layered.py     loads that a step waits for, layer by layer
    copies.py      the engine's memory, and the copies between it and the store's
    spaces.py      what gives a block its meaning: the namespace of each rank, group, adapter and salt
    messages.py    what the two sides tell each other
    events.py      KV events of what was stored
    handoff.py     prefill in one engine, decode in another
    figures.py     counters for vLLM's log and /metrics
    settings.py    kv_connector_extra_config

The engine never waits for the store: the scheduler looks into shared memory only, and workers hand
jobs to threads. Whatever goes wrong with the store is a miss, or blocks not stored.
"""

from kvstore_client.connectors.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]
