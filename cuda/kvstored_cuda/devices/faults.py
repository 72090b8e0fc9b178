"""Faults on purpose: what a HostDevice does slowly, or not at all.

A plan is given to the device at its construction; other processes read theirs from the
environment variable KVSTORED_HOST_DEVICE_FAULTS:

    open:delay=0.2; transfer:delay=0.5,times=1; allocate:fail=OutOfDeviceMemory,after=3

Each rule names a call and what happens to it: `delay` (seconds; `release` ends it early),
`fail` (a class of errors.py), `after` (that many go well first), `times` (for so many, then
never again). A call that hangs is one with a long delay.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from kvstored_cuda.devices import errors

VARIABLE = "KVSTORED_HOST_DEVICE_FAULTS"

CALLS = frozenset(
    {"allocate", "free", "open", "close", "copy", "transfer", "record", "event", "open_event", "close_event"}
    | {"query", "register", "unregister", "host_allocate", "memory"}
)
"""`copy` is the call that enqueues, `transfer` the moving of the bytes: where it fails, the device is lost (as in
CUDA, whose asynchronous errors stick). So it is where any call fails with DeviceLost."""


@dataclass
class Fault:
    """One rule: the fields are those of the module's docstring. `times` below zero: for ever."""

    call: str
    delay_s: float = 0.0
    fail: type[errors.DeviceError] | None = None
    after: int = 0
    times: int = -1

    def __post_init__(self) -> None:
        if self.call not in CALLS:
            raise ValueError(f"a fault of {self.call!r}; there are {', '.join(sorted(CALLS))}")


class FaultPlan:
    """Rules, applied in the order in which they were given; empty: all goes well. Thread-safe.

    trusting: what an event says whose recording process died before the work was done. CUDA
    does not define it; the worse answer for who believes it is True ("complete").
    """

    def __init__(self, *faults: Fault, trusting: bool = False) -> None:
        self.trusting = trusting
        self._lock = threading.Lock()
        self._faults = list(faults)
        self._released = threading.Event()

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def release(self) -> None:
        """Ends all delays, those under way as well, for good."""
        self._released.set()

    def meet(self, call: str) -> None:
        """What happens to one `call`: waits, then raises, as the rules say."""
        delay_s, fail = 0.0, None
        with self._lock:
            for fault in self._faults:
                if fault.call != call or fault.times == 0:
                    continue
                if fault.after > 0:
                    fault.after -= 1
                    continue
                fault.times -= 1
                delay_s += fault.delay_s
                fail = fail or fault.fail
        if delay_s:
            self._released.wait(delay_s)
        if fail:
            raise fail(f"{call}: a fault on purpose; {fail.remedy}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "FaultPlan":
        """The plan in the variable. Raises ValueError for what it cannot read."""
        text = environment.get(VARIABLE, "")
        rules = [rule.strip() for rule in text.split(";") if rule.strip()]
        trusting = "trusting" in rules
        return cls(*(_rule(rule) for rule in rules if rule != "trusting"), trusting=trusting)


def _rule(text: str) -> Fault:
    call, _, settings = text.partition(":")
    fault = Fault(call.strip())
    for setting in settings.split(","):
        name, _, value = (part.strip() for part in setting.partition("="))
        if name == "delay":
            fault.delay_s = float(value)
        elif name == "after":
            fault.after = int(value)
        elif name == "times":
            fault.times = int(value)
        elif name == "fail":
            kind = getattr(errors, value, None)
            if not (isinstance(kind, type) and issubclass(kind, errors.DeviceError)):
                raise ValueError(f"{VARIABLE}: {value!r} is no error of a device")
            fault.fail = kind
        else:
            raise ValueError(f"{VARIABLE}: {name!r} in {text!r}; a rule has delay, fail, after and times")
    return fault
