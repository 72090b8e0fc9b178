"""Devices over gRPC, for a program that is bound to a session: the same calls, and no descriptors."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.kvstore_pb2_grpc import KVStoreStub
from tests.conftest import eventually
from tests.gpu.edge_program import DeviceProgram, programs
from tests.gpu.gpu_nodes import GpuNode
from tests.server.ssd_program import keys_of

WAIT_S = 30.0
Code = grpc.StatusCode


class Bound(DeviceProgram):
    """Whose calls about devices go over gRPC."""

    stub: Any
    segments_on_socket = False

    def ask_device(self, **op: Any) -> pb.DeviceReply:
        if self.segments_on_socket and "segments" in op:
            return super().ask_device(**op)
        metadata = (("kvstored-session", self.token.hex()),)
        reply: pb.DeviceReply = self.stub.Device(self.request(**op), timeout=WAIT_S, metadata=metadata)
        return reply


def bound_to(node: GpuNode, stub: Any) -> Bound:
    made = Bound(node.socket, node.uuids[0])
    made.stub = stub
    return made


@pytest.fixture(params=["ipc", "descriptor"])
def node(request: pytest.FixtureRequest, start_gpu_node: Callable[..., GpuNode]) -> GpuNode:
    return start_gpu_node(server__grpc="127.0.0.1:0", gpu__handles=request.param)


@pytest.fixture
def stub(node: GpuNode) -> Iterator[Any]:
    with grpc.insecure_channel(node.grpc_endpoint.removeprefix("grpc://")) as channel:
        yield KVStoreStub(channel)


def test_a_bound_program_puts_and_reads_and_takes_descriptors_on_the_socket(node: GpuNode, stub: Any) -> None:
    keys = keys_of("a", 3)
    one = bound_to(node, stub)
    with programs(node) as make:
        helper = make()
        slots = one.reserve(3)
        segments = pb.SegmentsRequest(ids=[slots[0] >> 32])
        if node.settings["gpu.handles"] == "descriptor":
            with pytest.raises(grpc.RpcError) as refused:
                one.ask_device(segments=segments)
            assert refused.value.code() == Code.FAILED_PRECONDITION
            assert "session socket" in refused.value.details()
            assert 'gpu.handles = "ipc"' in refused.value.details()
            one.segments_on_socket = True
        one.write(slots, keys)
        event = one.record()
        assert event.handle is not None
        reply = one.commit_on_device(keys, slots, event.handle.to_bytes())
        metadata = (("kvstored-session", one.token.hex()),)
        found = eventually(
            lambda: (
                (said := stub.Ticket(pb.TicketRequest(ticket=reply.ticket, wait_ms=500), metadata=metadata)).state
                != pb.TICKET_RUNNING
                and said
            ),
            what="the commit",
        )
        assert list(found.results) == [pb.STORED] * 3
        one.check_device(keys)
        helper.check_device(keys)
        assert [one.uuid] == [each.uuid for each in stub.Devices(pb.DevicesRequest(), metadata=metadata).devices]
    one.close()


def test_who_is_bound_to_no_session_has_nothing_to_do_with_devices(node: GpuNode, stub: Any) -> None:
    for call, request in ((stub.Devices, pb.DevicesRequest()), (stub.Device, pb.DeviceRequest(device="HOST-1"))):
        with pytest.raises(grpc.RpcError) as refused:
            call(request, timeout=WAIT_S)
        assert refused.value.code() == Code.FAILED_PRECONDITION
        assert "bound to a session" in refused.value.details()
