"""Background loops that cannot die unseen.

A loop calls its step again and again; what the step raises is counted, logged and shown
in stats and health until a later step succeeds, and the loop goes on. (In the field an
eviction thread that raised once was gone for good, and every later store failed.)
"""

import asyncio
from collections.abc import Callable

from kvstore.logs import logger
from kvstored.v1 import kvstore_pb2 as pb

log = logger("kvstored.loops")

RETRY_S = 0.5
"""Pause after a step that failed, so that a lasting fault costs no CPU."""


class Loop:
    """One background loop on the event loop: `step()` answers True while there is more to do at once."""

    def __init__(self, name: str, interval_s: float, step: Callable[[], bool]) -> None:
        self.name = name
        self.step = step
        self.runs = 0
        self.errors = 0
        self.last_error = ""
        self.failing = False
        self._interval_s = interval_s
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self.name)

    def wake(self) -> None:
        """Runs the step soon instead of at the end of the interval."""
        self._wake.set()

    async def stop(self) -> None:
        """Ends the loop after the step under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def stats(self) -> pb.LoopStats:
        return pb.LoopStats(
            name=self.name, runs=self.runs, errors=self.errors, last_error=self.last_error, failing=self.failing
        )

    async def _run(self) -> None:
        while True:
            pause = self._interval_s
            try:
                if self.step():
                    pause = 0.0
                self.runs += 1
                self.failing = False
            except Exception as e:
                self.errors += 1
                self.failing = True
                self.last_error = f"{type(e).__name__}: {e}"
                log.exception(f"background loop {self.name} failed; it goes on", again_in_s=RETRY_S)
                pause = RETRY_S
            if pause == 0.0:
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
