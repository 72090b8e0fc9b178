"""What the workers of devices need of the slab."""

from typing import Protocol


class SlabBytes(Protocol):
    """The slab, or a test's."""

    def bytes_at(self, segment: int, offset: int, length: int) -> memoryview:
        """Keeps the memory mapped while it lives."""
