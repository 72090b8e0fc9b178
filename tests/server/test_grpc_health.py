"""The standard services over gRPC: health, which is watched, and reflection."""

import asyncio
import time
from typing import Any

import grpc
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.server import grpc_health
from kvstore.server.grpc_health import REFLECTIONS_MAX, WATCHES_MAX
from kvstore.server.grpc_service import SERVICE
from kvstored.v1 import kvstore_pb2 as pb
from tests.server.grpc_edge import Scene, refused, with_edge

Code = grpc.StatusCode
SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3
WAIT_S = 30.0
Ask = health_pb2.HealthCheckRequest


def health_of(scene: Scene) -> Any:
    """A stub on a connection of its own, closed with the test's loop."""
    return health_pb2_grpc.HealthStub(scene.channel)


def test_check_says_whether_the_daemon_is_healthy() -> None:
    async def scenario(scene: Scene) -> None:
        stub, problems = health_of(scene), ["a loop fails"]
        for name in ("", SERVICE):
            scene.node.problems = list
            assert (await stub.Check(Ask(service=name))).status == SERVING
            scene.node.problems = lambda: problems
            assert (await stub.Check(Ask(service=name))).status == NOT_SERVING
        for name in ("kvstored", "kvstored.v1.Nothing", SERVICE.lower(), "x" * 10_000):
            with refused(Code.NOT_FOUND, "no service"):
                await stub.Check(Ask(service=name))
        async with grpc.aio.insecure_channel(scene.edge.address) as channel:
            for method in ("Check", "Watch"):
                kind = channel.unary_unary if method == "Check" else channel.unary_stream
                call = kind(f"/grpc.health.v1.Health/{method}")(b"\xff\xff\xff\xff")
                with refused(Code.INVALID_ARGUMENT, "4 bytes that are not a HealthCheckRequest"):
                    await (call if method == "Check" else call.read())

    with_edge(scenario)


def test_changes_are_pushed_to_all_who_watch_also_after_one_has_left() -> None:
    async def scenario(scene: Scene) -> None:
        stub, problems = health_of(scene), list[str]()
        scene.node.problems = lambda: problems
        watches = [stub.Watch(Ask(service=name), timeout=WAIT_S) for name in ("", "", SERVICE)]
        unknown = stub.Watch(Ask(service="another"), timeout=WAIT_S)
        for watch in watches:
            assert (await watch.read()).status == SERVING
        assert (await unknown.read()).status == UNKNOWN
        watches.pop().cancel()
        for expected in (NOT_SERVING, SERVING, NOT_SERVING):
            problems[:] = ["ill"] if expected == NOT_SERVING else []
            began = time.monotonic()
            for watch in watches:
                assert (await watch.read()).status == expected
            assert time.monotonic() - began < WAIT_S / 3
        for watch in (*watches, unknown):
            watch.cancel()

    with_edge(scenario)


def test_who_watches_learns_of_the_end_and_does_not_hold_it_up() -> None:
    async def scenario(scene: Scene) -> None:
        watches = [health_of(scene).Watch(Ask(), timeout=WAIT_S) for _ in range(3)]
        for watch in watches:
            assert (await watch.read()).status == SERVING
        began = time.monotonic()
        stopping = asyncio.create_task(scene.edge.stop(WAIT_S))
        for watch in watches:
            assert (await watch.read()).status == NOT_SERVING
            assert await watch.read() is grpc.aio.EOF
        await stopping
        assert time.monotonic() - began < WAIT_S / 3

    with_edge(scenario)


def test_watches_have_their_own_number_of_places() -> None:
    async def scenario(scene: Scene) -> None:
        stub = health_of(scene)
        watches = [stub.Watch(Ask()) for _ in range(WATCHES_MAX)]
        for watch in watches:
            assert (await watch.read()).status == SERVING
        with refused(Code.RESOURCE_EXHAUSTED, f"{WATCHES_MAX} Watch calls"):
            await stub.Watch(Ask()).read()
        assert (await stub.Check(Ask())).status == SERVING
        watches.pop().cancel()
        await scene.until(lambda: scene.edge._health._watching < WATCHES_MAX)
        watches.append(stub.Watch(Ask()))
        assert (await watches[-1].read()).status == SERVING
        for watch in watches:
            watch.cancel()
        await scene.until(lambda: not scene.edge._health._watching)
        # Nobody watches: nobody looks.
        await scene.until(lambda: scene.edge._health._poll is None)

    with_edge(scenario)


def test_a_look_that_fails_is_a_bug_that_is_counted_and_watching_goes_on(monkeypatch: Any) -> None:
    async def scenario(scene: Scene) -> None:
        watch = health_of(scene).Watch(Ask(), timeout=WAIT_S)
        assert (await watch.read()).status == SERVING
        with monkeypatch.context() as broken:
            looks = iter(range(1))
            broken.setattr(scene.node, "problems", lambda: [] if next(looks, None) is None else 1 / 0)
            await scene.until(lambda: scene.node.internal_errors)
        scene.node.problems = lambda: ["internal errors"]
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()

    with_edge(scenario)


# -- reflection


def test_reflection_tells_the_services_and_their_messages() -> None:
    async def scenario(scene: Scene) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(scene.channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such"),
        ]
        answers = [answer async for answer in stub.ServerReflectionInfo(iter(asked), timeout=WAIT_S)]
        names = {service.name for service in answers[0].list_services_response.service}
        assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        files = {}
        for serialised in answers[1].file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(serialised)
            files[file.name] = file
        methods = {method.name for method in files["kvstored/v1/kvstore.proto"].service[0].method}
        assert methods == set(pb.DESCRIPTOR.services_by_name["KVStore"].methods_by_name)
        assert answers[2].error_response.error_code == Code.NOT_FOUND.value[0]
        async with grpc.aio.insecure_channel(scene.edge.address) as channel:
            call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")()
            await call.write(b"\xff\xff")
            with refused(Code.INVALID_ARGUMENT):
                await call.read()

    with_edge(scenario)


def test_every_method_of_the_contract_is_served() -> None:
    async def scenario(scene: Scene) -> None:
        async with grpc.aio.insecure_channel(scene.edge.address) as channel:
            for name in pb.DESCRIPTOR.services_by_name["KVStore"].methods_by_name:
                with refused(Code.INVALID_ARGUMENT, "2 bytes that are not a"):
                    await channel.stream_unary(f"/{SERVICE}/{name}")(iter([b"\xff\xff"]))

    with_edge(scenario)


def test_reflection_streams_are_few_and_end_when_nothing_is_asked(monkeypatch: Any) -> None:
    async def scenario(scene: Scene) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(scene.channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        idle = [stub.ServerReflectionInfo() for _ in range(REFLECTIONS_MAX)]
        for call in idle:
            await call.write(ask)
            assert await call.read() is not grpc.aio.EOF
        with refused(Code.RESOURCE_EXHAUSTED, f"{REFLECTIONS_MAX} reflection calls"):
            await stub.ServerReflectionInfo().read()
        for call in idle:
            with refused(Code.DEADLINE_EXCEEDED, "the next question did not come"):
                await call.read()

    monkeypatch.setattr(grpc_health, "REFLECTION_IDLE_S", 1.0)
    with_edge(scenario)
