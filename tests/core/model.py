"""What may be present and who may touch what, kept with plain dicts beside the store.

Memory is modelled page by page and by contents: whoever holds a slot writes numbers into
its pages, and a block is right if its pages say what its committer wrote.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.core.block import PINNED
from kvstore.core.holds import Namespace, Session
from kvstore.core.store import Store
from tests.core.scene import PAGE

Page = tuple[int, int]
"""Segment and page in it."""

Name = tuple[int, bytes]
"""Tenant and key."""


@dataclass
class Block:
    """A block that was committed and not seen to go."""

    namespace: Namespace
    ref: int
    content: int
    dies: float | None = None
    pinned: float | None = None


@dataclass
class Process:
    """One client process; its socket may be gone while it lives on."""

    session: Session
    ended: bool = False
    granted: dict[int, float] = field(default_factory=dict)
    leased: Counter[int] = field(default_factory=Counter)
    sees: dict[int, int] = field(default_factory=dict)
    """Leased slot -> what it said when it was leased."""
    mapped: set[int] = field(default_factory=set)
    """Segments it has mapped."""


class Model:
    """The truth that the store is compared with."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.blocks: dict[Name, Block] = {}
        self.processes: list[Process] = []
        self.memory: dict[Page, int] = {}
        self.sizes: dict[int, int] = {}
        self.may_evict = False
        self.may_go: set[Name] = set()
        self.evicted = 0

    # -- memory

    def pages(self, ref: int) -> set[Page]:
        """The pages of a slot, by the size that its segment has now."""
        segment = self.store.segments.live[ref >> 32]
        assert segment.pool is not None
        count = segment.pool.slot_bytes // PAGE
        first = (ref & 0xFFFFFFFF) * count
        assert (first + count) * PAGE <= segment.size_bytes, "a slot sticks out of its segment"
        return {(segment.id, first + i) for i in range(count)}

    def write(self, ref: int, content: int) -> None:
        for page in self.pages(ref):
            self.memory[page] = content

    def reads(self, ref: int, content: int) -> bool:
        return all(self.memory[page] == content for page in self.pages(ref))

    def touchable(self) -> set[Page]:
        """Pages that a live process may write to, or looks at through a view."""
        held: set[Page] = set()
        for process in self.processes:
            for ref in (*process.granted, *process.leased):
                held |= self.pages(ref)
        return held

    def map(self, process: Process, ref: int) -> None:
        """The process is given the descriptor of the slot's segment."""
        self.store.segments.live[ref >> 32].sessions.add(process.session.id)
        process.mapped.add(ref >> 32)
        self.sizes[ref >> 32] = self.store.segments.live[ref >> 32].size_bytes

    def dropped(self, segment: int) -> None:
        """The memory of a segment is given back, but for what is still mapped somewhere."""
        for page in [page for page in self.memory if page[0] == segment]:
            del self.memory[page]
        for process in self.processes:
            for ref in (*process.granted, *process.leased):
                assert ref >> 32 != segment, "a segment was dropped under a live process"

    def fits(self) -> None:
        """Live segments, those being made, and dropped ones that somebody still has mapped fit in the slab."""
        table = self.store.segments
        mapped = {number for process in self.processes for number in process.mapped} - table.live.keys()
        used = sum(segment.size_bytes for segment in table.live.values()) + sum(table.making.values())
        assert used + sum(self.sizes[number] for number in mapped) <= table.size_bytes, "more memory than there is"

    # -- holds

    def granted(self, process: Process, refs: Iterable[int], expires: float) -> None:
        """The store handed out these slots: nobody else may have anything to do with them."""
        held = self.touchable()
        visible: set[Page] = set()
        for block in self.blocks.values():
            visible |= self.pages(block.ref)
        for ref in refs:
            pages = self.pages(ref)
            assert not pages & held, f"slot {ref:#x} was handed out while a live process may touch it"
            assert not pages & visible, f"slot {ref:#x} was handed out while it holds a visible block"
            held |= pages
            process.granted[ref] = expires
            self.map(process, ref)

    def leased(self, process: Process, name_refs: Iterable[tuple[Name, int]]) -> None:
        for name, ref in name_refs:
            block = self.blocks[name]
            assert ref == block.ref, "a lease of another slot than the block's"
            process.leased[ref] += 1
            process.sees[ref] = block.content
            self.map(process, ref)

    def released(self, process: Process, ref: int, count: int = 1) -> None:
        process.leased[ref] -= count
        if not process.leased[ref]:
            del process.leased[ref]
            del process.sees[ref]

    def is_held(self, name: Name) -> bool:
        block = self.blocks[name]
        return block.pinned is not None or any(block.ref in process.leased for process in self.processes)

    # -- blocks

    def withdrawn(self, tenant: int, key: bytes) -> None:
        """The store took a block away from readers: only what was asked for, or what nobody holds."""
        name = (tenant, key)
        if name in self.may_go:
            self.may_go.discard(name)
        else:
            assert self.may_evict, f"{key.hex()[:8]} went in a call that may not evict"
            assert not self.is_held(name), f"{key.hex()[:8]} was evicted while it is held"
            self.evicted += 1
        del self.blocks[name]

    def held_bytes(self, process: Process) -> int:
        """Bytes that a process holds, each slot once."""
        live, held = self.store.segments.live, 0
        for ref in {*process.granted, *process.leased}:
            pool = live[ref >> 32].pool
            assert pool is not None
            held += pool.slot_bytes
        return held

    # -- the comparison

    def compare(self, published: dict[Name, tuple[int, int, int, int]]) -> None:
        """Everything visible is what the model has, where it has it, and says what its committer wrote."""
        assert published.keys() == self.blocks.keys(), "what is present is not what the model says"
        for name, block in self.blocks.items():
            ref, offset, length, namespace = published[name]
            assert (ref, length, namespace) == (block.ref, block.namespace.block_bytes, block.namespace.id)
            assert (ref >> 32, offset // PAGE) in self.pages(ref), "published at another place than its slot's"
            assert self.reads(ref, block.content), f"{name[1].hex()[:8]} does not say what its committer wrote"
            row = block.namespace.tenant.rows[name[1]]
            assert bool(self.store.table.marks[row] & PINNED) == (block.pinned is not None), "a pin"
        self.fits()
        for process in self.processes:
            for ref, content in process.sees.items():
                assert self.reads(ref, content), f"slot {ref:#x} changed under a view"
            session = process.session
            assert session.granted.keys() == process.granted.keys(), "slots granted"
            assert session.leased == dict(process.leased), "slots leased"
            assert session.held_bytes == self.held_bytes(process), "bytes held"
            assert session.ended == process.ended
        assert {p.session.id for p in self.processes} == self.store.sessions.keys()
