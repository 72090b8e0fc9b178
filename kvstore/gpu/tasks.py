"""Tasks of the event loop that cannot die unseen."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvstore.logs import logger

log = logger("kvstored.gpu")


class Tasks:
    """Of one device's workers."""

    def __init__(self, failed: Callable[[str], None]) -> None:
        """`failed` is told of a bug that ended a task: what the task was to report is reported by whoever is told."""
        self._failed = failed
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a worker of a device failed", task=task.get_name(), exc_info=error)
            self._failed(f"{type(error).__name__}: {error}")

    def cancel(self) -> None:
        for task in list(self._running):
            task.cancel()
