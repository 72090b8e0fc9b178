"""Commits to a device's memory, from when they are sent until it is known how they ended, whoever asks for that."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore_client.holdings import DeviceHold
from kvstored.v1 import kvstore_pb2 as pb

if TYPE_CHECKING:
    from kvstore_client.device_session import DeviceSession

FORGOTTEN = "the daemon does not know any more how it ended"
"""Of a commit that was asked for too late."""


class DeviceCommit:
    """A Commit that was sent, until its end is known: `results` then, one for each slot; empty where none was stored.

    From when it is sent the slots are the daemon's. They are the hold's again where the results say EXISTS or REJECTED
    of them, where it failed (its event could not be followed), and where nobody can be asked how it ended: they go back
    with the hold, which ends behind the copies.

    One that is dropped while its end is not known is asked for by the client's thread.
    """

    def __init__(self, session: "DeviceSession", hold: DeviceHold, slots: list[int]) -> None:
        self.session, self._terms = session, hold.terms
        self._slots = slots
        self.ticket = 0
        self.sent = self.over = False
        self.results: list[int] = []
        self.why = ""

    def answered(self, results: Sequence[int], ticket: int) -> None:
        """What the daemon said to it: the end, or a ticket to ask for that."""
        self.ticket = ticket
        if not ticket:
            self._end(results)

    def ask(self, wait_s: float, timeout_s: float) -> bool:
        """Whether it is over; the daemon waits so long for that. Raises like any call: then it is not known."""
        if not self.over:
            question = pb.TicketRequest(ticket=self.ticket, wait_ms=int(wait_s * 1000))
            reply = self.session.call(pb.Request(ticket=question), timeout_s).ticket
            if reply.state != pb.TICKET_RUNNING:
                done = reply.state == pb.TICKET_DONE
                self.why = "" if done else reply.why or FORGOTTEN
                self._end(list(reply.results) if done else [])
        return self.over

    def _end(self, results: Sequence[int]) -> None:
        stored = {slot for slot, result in zip(self._slots, results, strict=False) if result == pb.STORED}
        self._terms.holdings.no_longer(self._terms, stored)
        self._terms.slots.extend(slot for slot in self._slots if slot not in stored)
        self.results, self.over = list(results), True

    def unknown(self) -> None:
        """Nobody can be asked: the slots go back with the hold, if they are ours."""
        if not self.over:
            self._terms.slots.extend(self._slots)
            self.over = True
        self.end_hold()

    def end_hold(self) -> None:
        """When it is over: what is the hold's again goes back with it, or now if it has ended before."""
        if self._terms.gone:
            self._terms.told()

    def __del__(self) -> None:
        """As of a call that ended by an exception of a signal handler."""
        if self.sent and not self.over:
            self._terms.holdings.unsettled.append(self)
