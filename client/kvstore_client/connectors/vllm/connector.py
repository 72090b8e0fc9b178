"""The class that vLLM makes, once in its scheduler and once in each worker: hands every hook on to its side."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvstore_client import Client
from kvstore_client.connectors.vllm.figures import PromMetrics, Stats
from kvstore_client.connectors.vllm.messages import Orders, Report
from kvstore_client.connectors.vllm.scheduling import SchedulerSide
from kvstore_client.connectors.vllm.settings import Settings, settings_of
from kvstore_client.connectors.vllm.spaces import Description, Rank
from kvstore_client.connectors.vllm.working import WorkerSide
from kvstore_client.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unauthenticated

log = logging.getLogger("kvstore_client")

NOWHERE = "unix:///proc/kvstored.sock"
"""Where nobody can listen."""


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """KV cache of prefixes from and to a kvstored on this machine."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises InvalidArgument for settings, or an engine, that it cannot serve; never because the daemon is away."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = settings_of(self._kv_transfer_config.kv_connector_extra_config)
        parallel = vllm_config.parallel_config
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            raise InvalidArgument("kvstored's connector does not serve context parallelism")
        name = f"vllm-{role.name.lower()}-{self._kv_transfer_config.engine_id}"
        client = client_of(settings, name)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._insist_on_recompute()
            self._scheduler = SchedulerSide(client, settings, vllm_config, kv_cache_config)
            self._tally = self._scheduler.tally
        else:
            self._worker = WorkerSide(client, settings, vllm_config, kv_cache_config, rank_of(parallel))
            self._tally = self._worker.tally

    def _insist_on_recompute(self) -> None:
        """vLLM reads the policy after this: with its default, "fail", a block that went away would fail a request."""
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            log.warning("kvstored: kv_load_failure_policy is set to recompute: what the store lacks is computed")
            self._kv_transfer_config.kv_load_failure_policy = "recompute"

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not saved is computed by who needs it."""
        return False

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._tally.add("engine_seconds", time.perf_counter() - began)

    # -- in the scheduler

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a hook of the scheduler's"
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._scheduling.describe([metadata[rank] for rank in sorted(metadata)])

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduling.bind(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        with self._timed():
            tokens = self._scheduling.lookup(request, num_computed_tokens)
        return tokens, bool(tokens) and not self._scheduling.is_layered(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        with self._timed():
            self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        with self._timed():
            return self._scheduling.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        with self._timed():
            report = connector_output.kv_connector_worker_meta
            assert report is None or isinstance(report, Report)
            self._scheduling.heard(report, list(connector_output.finished_recving or ()))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """What is still to be saved is pinned by the connector: the engine need not keep the request for it."""
        with self._timed():
            return False, self._scheduling.finished(request, block_ids)

    def take_events(self) -> Iterable[Any]:
        return self._scheduling.take_events()

    def has_pending_push_work(self) -> bool:
        return self._scheduling.saving

    def has_pending_block_frees(self) -> bool:
        return self._scheduling.freeing_soon

    def reset_cache(self) -> bool | None:
        return self._scheduling.reset()

    # -- in a worker

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "a hook of a worker's"
        return self._worker

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._working.register(kv_caches)

    def get_handshake_metadata(self) -> Description | None:
        return self._working.description

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing to do: what is being saved of a preempted request is pinned, so nobody overwrites it."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        with self._timed():
            self._working.begin_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """For a load that the step itself waits for (`layers`); others end between steps."""
        self._working.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        with self._timed():
            self._working.begin_saves(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        done, failed = self._working.take_ended(self._orders())
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed if self._is_hybrid else set())

    @functools.cached_property
    def _is_hybrid(self) -> bool:
        return len(self._kv_cache_config.kv_cache_groups) > 1

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._working.take_bad_blocks()

    def build_connector_worker_meta(self) -> Report | None:
        return self._working.take_report()

    # -- in both

    def get_kv_connector_stats(self) -> Stats | None:
        return self._tally.take()

    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        assert side is not None
        side.close()

    # -- of the class

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layers"))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def client_of(settings: Settings, name: str) -> Client:
    """Of the daemon; where that will not have us (another protocol, too many sessions), one that finds nothing."""
    try:
        return Client(settings.endpoint or None, tenant=settings.tenant, name=name, timeout_s=settings.timeout_s)
    except (FailedPrecondition, ResourceExhausted, Unauthenticated) as e:
        log.error("kvstored: this engine runs without a store until it is started again: %s", str(e))  # noqa: TRY400
        return Client(NOWHERE, name=name)


def rank_of(parallel: Any) -> Rank:
    """This worker's part of the model."""
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return Rank(parallel.rank % tp_size, tp_size, parallel.rank // tp_size % pp_size, pp_size)
