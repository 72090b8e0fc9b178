"""A thread for calls that may never return: unlike an executor's of the library, it keeps no process from ending."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class LoneThread(Executor):
    """Runs one call after the other. Waiting for it is the caller's choice, and for how long."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """It ends when it has done what it was given; `cancel_futures` is not for this kind."""
        assert not cancel_futures, "what it has taken is done"
        self._calls.put(None)
        if wait:
            self._thread.join()

    def _serve(self) -> None:
        while (taken := self._calls.get()) is not None:
            future, call = taken
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as e:  # noqa: BLE001 (it is its caller's)
                future.set_exception(e)
            else:
                future.set_result(result)
            del taken, future, call
