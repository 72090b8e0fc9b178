"""An index that nobody reads: clients hold what they copy from a device (Acquire), and look nowhere."""

from kvstore.core.tree import Numbers


class Unread:
    """Where a device's store publishes."""

    def publish(self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int) -> None: ...

    def fill(
        self, tenant: int, keys: list[bytes], refs: Numbers, offsets: Numbers, lengths: Numbers, namespaces: Numbers
    ) -> None:
        raise AssertionError("a device's blocks come one by one")

    def withdraw(self, tenant: int, key: bytes) -> None: ...
