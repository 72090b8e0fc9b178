"""kvstored as the second level of `lmcache server`.

    --l2-adapter '{"type": "plugin", "module_path": "kvstore_client.connectors.lmcache.l2",
                   "class_name": "KVStoreL2Adapter", "adapter_params": {"endpoint": "unix:///..."}}'

An object is one block, copied once between LMCache's memory and the store's. Its name is LMCache's chunk hash
with the rank and the cache salt; model, object group and the layout of its tensors name the namespace.

LMCache submits tasks and is called by event descriptors. Stores, lookups and loads each have a thread, so
that none of them waits for another kind. No task raises: it is answered as not stored, not found or not
loaded. A lock is a lease (locks.py): what a lookup found stays in memory until it is unlocked, or for LOCK_S. Where
that is more than a session may hold, the rest is found without a lock, and may be gone when it is loaded. Locks have a
session of their own, so that stores are not short of slots for them.
"""

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvstore_client import Client, Namespace
from kvstore_client.connectors import parts
from kvstore_client.connectors.lmcache.locks import Locks
from kvstore_client.connectors.lmcache.objects import Layout, layout_of, memory, size_bytes
from kvstore_client.connectors.lmcache.objects import layout as objects_layout
from kvstore_client.errors import InvalidArgument, KVStoreError

log = logging.getLogger("kvstore_client")

SETTINGS = {"endpoint": None, "tenant": "default", "revision": "", "timeout_s": 0.5}
"""Of adapter_params, with their defaults. `revision`: of the weights, which a model's name does not say."""

TASKS_MAX = 256
"""Waiting in each thread; more are answered at once as having failed."""

LAYOUTS_MAX = 8
"""Remembered of one model and group, for lookups that do not say what they look for."""

Places = list[int]


class _Lane:
    """A thread that works on tasks of one kind, and what came of them."""

    def __init__(self, name: str) -> None:
        self.event = create_event_notifier()
        self._thread = ThreadPoolExecutor(1, f"kvstore-{name}")
        self._lock = threading.Lock()
        self._done: dict[int, Any] = {}
        self._waiting = 0
        self._closed = False
        self.failed = 0

    def submit(self, number: int, work: Callable[[], Any], otherwise: Any) -> None:
        """Has it done; `otherwise` is what came of it where it raises, or where too much waits already."""

        def run() -> None:
            answer = otherwise
            try:
                answer = work()
            except Exception as e:
                ours = None if isinstance(e, KVStoreError) else e
                log.warning("%s counts as having failed: %s", threading.current_thread().name, e, exc_info=ours)
                self.failed += 1
            self._finish(number, answer)

        with self._lock:
            full = self._waiting >= TASKS_MAX
            self._waiting += 1
        try:
            if not full:
                task = self._thread.submit(run)
                task.add_done_callback(lambda task: self._finish(number, otherwise) if task.cancelled() else None)
                return
        except RuntimeError:
            log.debug("a task comes after close()")
        self.failed += 1
        self._finish(number, otherwise)

    def _finish(self, number: int, answer: Any) -> None:
        with self._lock:
            self._waiting -= 1
            self._done[number] = answer
            if not self._closed:  # then its descriptor may be somebody else's by now
                self.event.notify()

    def pop(self, number: int) -> Any:
        """What came of one task, once; None while it is under way."""
        with self._lock:
            return self._done.pop(number, None)

    def pop_all(self) -> dict[int, Any]:
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        """Waits for the task under way; the others are answered as having failed."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            if not self._closed:
                self._closed = True
                self.event.close()


class _Space(NamedTuple):
    """Objects of one model, group and layout, by the session for transfers and by that for locks."""

    objects: Namespace
    locks: Namespace


Groups = dict[tuple[_Space, int], Places]
"""Objects of one namespace and rank, which are a chain: places in the list of a task's keys."""


class KVStoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache has no types
    """One server's adapter. Safe to use from LMCache's threads."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        """Raises InvalidArgument for settings it does not know; connects, and does without a daemon that is away."""
        super().__init__()
        unknown = sorted(params.keys() - SETTINGS.keys())
        if unknown:
            raise InvalidArgument(f"{', '.join(unknown)}: no such setting; there are {', '.join(sorted(SETTINGS))}")
        settings = {**SETTINGS, **params}
        self._timeout_s = float(settings["timeout_s"])
        self._revision = str(settings["revision"])
        self._client, self._locker = (
            Client(settings["endpoint"], tenant=settings["tenant"], name=name, timeout_s=self._timeout_s)
            for name in ("lmcache", "lmcache locks")
        )
        self._silence = parts.Silence(self._client, self._timeout_s)
        self._numbers = itertools.count()
        self._stores, self._lookups, self._loads = _Lane("store"), _Lane("lookup"), _Lane("load")
        self._state = threading.Lock()
        self._spaces: dict[tuple[Any, ...], _Space] = {}
        self._layouts: dict[tuple[Any, ...], list[Layout]] = {}
        self._locks = Locks()

    # -- descriptors, tasks

    def get_store_event_fd(self) -> int:
        return int(self._stores.event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookups.event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loads.event.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        number = next(self._numbers)
        self._stores.submit(number, lambda: self._store(keys, objects), L2StoreResult(False, 0))
        return number

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        number = next(self._numbers)
        self._lookups.submit(number, lambda: self._look_up(keys, group_layout_descs), Bitmap(len(keys)))
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.pop(task_id)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        number = next(self._numbers)
        self._loads.submit(number, lambda: self._load(keys, objects), Bitmap(len(keys)))
        return number

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.pop(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Ends one lock of each key."""
        self._locks.release(keys)

    # -- what the threads do

    def _store(self, keys: list[Any], objects: list[Any]) -> Any:
        if self._silence.lasts:
            return L2StoreResult(False, 0)
        whole, stored_bytes = True, 0
        for (space, _), places in self._grouped(keys, objects).items():
            store, names = space.objects, _names(space, [keys[i] for i in places])
            before = store.match(names).blocks

            def fill(number: int, view: memoryview, places: Places = places) -> None:
                np.copyto(np.frombuffer(view, np.uint8), memory(objects[places[number]]))

            done, result = parts.write(store, names, 0, fill)
            self._silence.heard(result.error)
            if result.error is not None:
                self._stores.failed += 1
                log.warning("%d objects are not stored: %s", result.rejected, result.error)
            whole &= done == len(names)
            stored_bytes += result.stored * store.block_bytes
            new = [keys[i] for i in places[before:done]]
            if new:
                self._notify_keys_stored(new, [store.block_bytes] * len(new))
        return L2StoreResult(whole, stored_bytes)

    def _look_up(self, keys: list[Any], descs: dict[int, Any]) -> Any:
        found, until = Bitmap(len(keys)), time.monotonic() + self._timeout_s
        for (space, _), places in self._asked(keys, descs).items():
            names = _names(space, [keys[i] for i in places])
            for at, end in parts.runs(space.objects, names, until):
                for i in places[at:end]:
                    found.set(i)
                self._locks.hold(space.locks, names[at:end], [keys[i] for i in places[at:end]], until)
        return found

    def _grouped(self, keys: list[Any], objects: list[Any]) -> Groups:
        groups: Groups = {}
        for i, (key, thing) in enumerate(zip(keys, objects, strict=True)):
            layout = layout_of(thing)
            groups.setdefault((self._space(key, layout, thing.get_size()), key.kv_rank), []).append(i)
        return groups

    def _asked(self, keys: list[Any], descs: dict[int, Any]) -> Groups:
        """Where to look for each key: by the layout that LMCache says, else by those that are known."""
        groups: Groups = {}
        for i, key in enumerate(keys):
            desc = descs.get(key.object_group_id)
            if desc is not None and desc.shapes:
                layouts = [objects_layout(desc.shapes, desc.dtypes)]
            else:
                layouts = self._layouts.get(_origin(key), [])
            for layout in layouts:
                space = self._spaces.get((*_origin(key), layout))
                if space is None:
                    space = self._space(key, layout, size_bytes(layout))
                groups.setdefault((space, key.kv_rank), []).append(i)
        return groups

    def _load(self, keys: list[Any], objects: list[Any]) -> Any:
        loaded, until = Bitmap(len(keys)), time.monotonic() + self._timeout_s
        for (space, _), places in self._grouped(keys, objects).items():
            names, at, part = _names(space, [keys[i] for i in places]), 0, len(places)
            while at < len(names):
                some = places[at : at + part]
                came = space.objects.get_into(names[at : at + part], [memory(objects[i]) for i in some])
                for i in some[:came]:
                    loaded.set(i)
                at += came
                part *= 2
                if came < len(some):
                    at, part = at + 1, 1
                    if time.monotonic() > until:
                        break  # a disk that is silent is not waited for at every gap
        accessed = [key for i, key in enumerate(keys) if loaded.test(i)]
        if accessed:
            self._notify_keys_accessed(accessed)
        return loaded

    def _space(self, key: Any, layout: Layout, block_bytes: int) -> _Space:
        """The namespace of objects of one model, group and layout."""
        origin = _origin(key)
        with self._state:
            space = self._spaces.get((*origin, layout))
        if space is not None and space.objects.block_bytes == block_bytes:
            return space
        identity = json.dumps([*origin, layout, self._revision, version("lmcache")])
        named = f"lmcache {key.model_name} {identity}"
        space = _Space(*(client.raw_namespace(named, block_bytes) for client in (self._client, self._locker)))
        with self._state:
            self._spaces[(*origin, layout)] = space
            known = self._layouts.setdefault(origin, [])
            if layout not in known:
                self._layouts[origin] = [*known, layout][-LAYOUTS_MAX:]
        return space

    # -- the rest

    def delete(self, keys: list[Any]) -> None:
        """Drops objects, and tells the listeners of those that were there."""
        groups: dict[_Space, list[Any]] = {}
        with self._state:
            for key in keys:
                for layout in self._layouts.get(_origin(key), []):
                    groups.setdefault(self._spaces[(*_origin(key), layout)], []).append(key)
        until = time.monotonic() + self._timeout_s
        for space, asked in groups.items():
            names, store = _names(space, asked), space.objects
            try:
                there = [i for at, end in parts.runs(store, names, until) for i in range(at, end)]
                if there:
                    store.remove([names[i] for i in there])
            except KVStoreError as e:
                log.warning("%d objects are not deleted: %s", len(asked), e)
                return
            if there:
                self._notify_keys_deleted([asked[i] for i in there], [store.block_bytes] * len(there))

    def report_status(self) -> dict[str, Any]:
        """Healthy is who is connected to a healthy daemon; LMCache does without it meanwhile."""
        try:
            health = self._client.health()
            healthy, problems = health.healthy, list(health.problems)
        except KVStoreError as e:  # it is closed
            healthy, problems = False, [str(e)]
        return {
            "is_healthy": healthy,
            "type": type(self).__name__,
            "endpoint": self._client.endpoint,
            "problems": problems,
            "locked": len(self._locks),
            "failed": {"store": self._stores.failed, "lookup": self._lookups.failed, "load": self._loads.failed},
        }

    def close(self) -> None:
        """Ends the threads, each with the task that it is at, and the connection, and with it all locks."""
        for lane in (self._stores, self._lookups, self._loads):
            lane.close()
        self._locks.close()
        self._locker.close()
        self._client.close()


def _origin(key: Any) -> tuple[Any, ...]:
    return key.model_name, key.object_group_id


def _names(space: _Space, keys: Sequence[Any]) -> list[bytes]:
    """Objects' names within their namespace. A salt is part of them: users are many, and namespaces are few."""
    salts = [key.cache_salt.encode() for key in keys]
    return [
        space.objects.key(b"%d:%d:%b:%b" % (key.kv_rank, len(salt), salt, key.chunk_hash))
        for key, salt in zip(keys, salts, strict=True)
    ]
