"""What moves blocks between tiers holds slots and blocks as any session does: by sessions of the daemon's own.

So limits, the audit and `stats` know of it. Their slots are of nobody's shared memory, but they
end by the report of a worker, never by a clock (rule 5).
"""

from kvstore.core.holds import INFINITY, Namespace, Session, Tenant
from kvstore.core.store import Store


class Carrier:
    """The sessions of one purpose in one store, one a tenant."""

    def __init__(self, store: Store, name: str, pid: int) -> None:
        self.store = store
        self._name = name
        self._pid = pid
        self._of: dict[int, Session] = {}

    def session(self, tenant: Tenant) -> Session:
        """The session in that tenant, made at first use."""
        found = self._of.get(tenant.id)
        if found is None:
            found = self._of[tenant.id] = self.store.open_session(
                tenant, self._name, 0.0, local=False, read_only=False, pid=self._pid, nonce=0
            )
        return found

    def take(self, namespace: Namespace) -> int | None:
        """A slot to write a block of that namespace to; None where there is none now."""
        if not self.may_hold(namespace, 1):
            return None
        store = self.store
        refs = store.take(self.session(namespace.tenant), store.pool(namespace), 1, INFINITY)
        return refs[0] if refs else None

    def give_back(self, tenant: Tenant, ref: int) -> None:
        """A slot that was taken and holds nothing."""
        self.store.abort(self.session(tenant), [ref])

    def may_hold(self, namespace: Namespace, blocks: int) -> bool:
        """Whether so many blocks more may be held or taken."""
        return self.store.allowed(self.session(namespace.tenant), self.store.pool(namespace)) >= blocks

    def hold(self, tenant: Tenant, row: int) -> int:
        """Keeps a block where it is; answers its slot. It is no use of the block."""
        store, session = self.store, self.session(tenant)
        ref, pool = store.table.place[row], store.tree.pool_of(row)
        held = session.leased.get(ref, 0)
        if not held:
            session.held_bytes += pool.slot_bytes
        session.leased[ref] = held + 1
        session.leases += 1
        store.tree.lease([row], tenant, pool, hit=False)
        return ref

    def holds(self, tenant: Tenant, ref: int) -> int:
        """How often it holds that slot: a move that is under way, or somebody who waits for one."""
        session = self._of.get(tenant.id)
        return 0 if session is None else session.leased.get(ref, 0)

    def release(self, tenant: Tenant, ref: int) -> None:
        """Ends one hold."""
        self.store.release(self.session(tenant), [ref])
