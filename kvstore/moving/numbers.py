"""The numbers that namespaces have in the SSD's catalogue, and which of them it knows.

Records name a namespace by its number, whose row says what it means: a record whose row is not
there is of nobody after a restart. So a row comes before the first record, and a block whose
row could not be written is not on the SSD, whatever became of the block itself.
"""

from kvstore.core.holds import Namespace
from kvstore.tiers.ssd.format import NamespaceRow


class NamespaceNumbers:
    """Of one open catalogue."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        """Number of a namespace in the SSD's store -> its number in the catalogue."""
        self._described: set[int] = set()
        """Numbers whose rows are in the catalogue."""
        self._describing: set[int] = set()
        """Numbers whose rows are on their way there."""
        self._unsure: dict[int, int] = {}
        """Writes that began before the row of their namespace was known to be there -> its number."""
        self._last = 0

    def __getitem__(self, namespace: int) -> int:
        return self._of[namespace]

    def found(self, number: int) -> None:
        """The catalogue has a row of that number."""
        self._last = max(self._last, number)
        self._described.add(number)

    def means(self, number: int, namespace: Namespace) -> None:
        """What a row that was found says."""
        self._of[namespace.id] = number

    def write(self, job: int, namespace: Namespace) -> tuple[int, NamespaceRow | None]:
        """The number for a write that begins, and the row that is to go ahead of it, if any is."""
        number = self._of.get(namespace.id)
        if number is None:
            self._last += 1
            number = self._of[namespace.id] = self._last
        if number in self._described:
            return number, None
        self._unsure[job] = number
        if number in self._describing:
            return number, None
        self._describing.add(number)
        row = NamespaceRow(
            number,
            namespace.tenant.name,
            namespace.digest,
            namespace.block_bytes,
            namespace.block_tokens,
            namespace.label,
        )
        return number, row

    def described(self, number: int, error: str) -> None:
        """How it went with a row."""
        self._describing.discard(number)
        if not error:
            self._described.add(number)

    def wrote(self, job: int) -> str:
        """Why a write that is reported cannot count; "" where it can."""
        number = self._unsure.pop(job, 0)
        return "" if not number or number in self._described else "the row of its namespace could not be written"

    def clear(self) -> None:
        """Another catalogue has taken the place of that one. Numbers are not used again."""
        for known in (self._of, self._described, self._describing, self._unsure):
            known.clear()
