"""The GPU tier's parts that daemon and client share: devices, and the copies between paged KV caches and slots.

Importing this package needs neither a GPU nor cupy or torch: what needs them imports them when it is made. It
imports nothing of the daemon and nothing of the client.

    layouts    what an engine's paged KV cache is, and what a slot of the store holds: PagedLayout
    tensors    a PagedLayout from an engine's tensors
    batches    which pages go to or come from which slots, checked
    plans      the tables and launches of the kernels in paged.cu
    twins      the same copies on the CPU, by numpy
    launching  the kernels on a GPU, through cupy
"""

from kvstored_cuda.batches import Batch, Copies, Way, check_batch
from kvstored_cuda.launching import KernelCopies
from kvstored_cuda.layouts import PagedLayout, Part, SlotOrder
from kvstored_cuda.tensors import paged_layout
from kvstored_cuda.twins import TwinCopies

__all__ = [
    "Batch",
    "Copies",
    "KernelCopies",
    "PagedLayout",
    "Part",
    "SlotOrder",
    "TwinCopies",
    "Way",
    "check_batch",
    "paged_layout",
]
