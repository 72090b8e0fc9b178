"""HTTP: the pages there are, and callers that ask too much, too slowly, or not at all."""

import contextlib
import http.client
import json
import os
import select
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvstore.server.http import CONNECTIONS_MAX, EXCHANGE_S, REQUEST_BYTES_MAX
from kvstore_client import Client
from tests.conftest import RunningDaemon, eventually
from tests.nodes import anonymous_bytes, block, descriptors, running

BLOCK = 64 << 10


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(server__http="127.0.0.1:0") as daemon:
        yield daemon


def place(daemon: RunningDaemon) -> tuple[str, int]:
    parts = urlsplit(daemon.http_url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def ask(
    daemon: RunningDaemon,
    path: str,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(*place(daemon), timeout=20)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def raw(daemon: RunningDaemon, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(place(daemon), timeout=EXCHANGE_S * 2)
    sock.sendall(data)
    return sock


def until_closed(sock: socket.socket) -> bytes:
    """All that comes until the daemon closes the connection."""
    got = b""
    try:
        while data := sock.recv(1 << 16):
            got += data
    except ConnectionResetError:
        pass
    return got


# -- what there is


def test_every_page_answers_and_names_what_it_is(node: RunningDaemon) -> None:
    status, headers, body = ask(node, "/")
    assert (status, headers["Server"], b"/metrics" in body) == (200, "kvstored", True)
    assert ask(node, "/healthz")[::2] == (200, b"ok\n")
    status, headers, body = ask(node, "/metrics")
    assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/plain")
    assert b"\nkvstored_healthy 1" in body
    status, headers, body = ask(node, "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    status, headers, body = ask(node, "/readyz")
    assert (status, headers["Content-Type"].split(";")[0], json.loads(body)["ready"]) == (200, "application/json", True)


def test_what_one_accepts_decides_the_form_of_metrics_for_nobody_else() -> None:
    """Whoever came first decided it for all, by a header that names another form which only begins like it."""
    with running(host__size="16MiB", server__http="127.0.0.1:0") as fresh:
        for accept, form in (
            ("application/openmetrics-text-not", "text/plain"),
            ("application/openmetrics-text", "application/openmetrics-text"),
            ("text/html, APPLICATION/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
            ("application/openmetrics-text-not", "text/plain"),
            ("", "text/plain"),
        ):
            _, headers, _ = ask(fresh, "/metrics", headers={"Accept": accept})
            assert headers["Content-Type"].split(";")[0] == form, accept


@pytest.mark.parametrize("path", ["/", "/healthz", "/metrics", "/readyz"])
def test_head_is_the_answer_without_its_body(node: RunningDaemon, path: str) -> None:
    status, headers, body = ask(node, path, "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 0


def test_all_else_is_refused(node: RunningDaemon) -> None:
    assert ask(node, "/nothing")[0] == 404
    assert ask(node, "/metrics/../etc/passwd")[0] == 404
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        status, headers, _ = ask(node, "/metrics", method, body=b"x" * 1000)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_stats_say_where_it_is_served(node: RunningDaemon) -> None:
    with Client(node.endpoint) as client:
        assert client.stats()["daemon"]["http"] == node.http_url.removeprefix("http://")


def test_a_unix_socket_is_its_owners_alone_and_goes_with_the_daemon(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    before = os.umask(0)
    try:
        with running(server__http=f"unix:{path}") as daemon:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(path))
                sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert until_closed(sock).endswith(b"ok\n")
            daemon.kill()
            assert path.exists()
            daemon.restart()
            assert daemon.stop() == 0
            assert not path.exists()
    finally:
        os.umask(before)


# -- for other machines


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningDaemon, ssl.SSLContext]]:
    """A daemon on every address, with TLS and a token; and the trust of those who ask."""
    where = tmp_path_factory.mktemp("guarded")
    key, certificate, tokens = where / "key.pem", where / "cert.pem", where / "tokens.toml"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=kvstored", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    key.chmod(0o600)
    tokens.write_text(f'[tokens.scraper]\ntoken = "{TOKEN}"\n')
    tokens.chmod(0o600)
    settings = {"server__tls_cert": certificate, "server__tls_key": key, "server__tokens": tokens}
    with running(server__http="0.0.0.0:0", **{name: str(path) for name, path in settings.items()}) as daemon:
        yield daemon, ssl.create_default_context(cafile=str(certificate))


TOKEN = "a-token-of-a-scraper"


def ask_tls(guarded: tuple[RunningDaemon, ssl.SSLContext], path: str, bearer: str = "") -> tuple[int, bytes]:
    daemon, trust = guarded
    connection = http.client.HTTPSConnection("127.0.0.1", place(daemon)[1], timeout=20, context=trust)
    try:
        connection.request("GET", path, headers={"Authorization": bearer} if bearer else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_figures_for_other_machines_need_a_token_and_probes_do_not(guarded: Any) -> None:
    for bearer in ("", "Bearer wrong-token-of-a-scraper", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer"):
        status, body = ask_tls(guarded, "/metrics", bearer)
        assert (status, b"kvstored_" in body) == (401, False), bearer
    status, body = ask_tls(guarded, "/metrics", f"Bearer {TOKEN}")
    assert (status, b"kvstored_healthy" in body) == (200, True)
    assert ask_tls(guarded, "/healthz")[0] == 200
    assert ask_tls(guarded, "/readyz")[0] in (200, 503)
    assert TOKEN not in guarded[0].output()


def test_without_tls_nothing_is_answered_and_silence_keeps_no_connection(guarded: Any) -> None:
    """A handshake that never comes takes a place like any other silence, and makes room."""
    daemon, _ = guarded
    with raw(daemon, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") as sock:
        assert b"kvstored_" not in until_closed(sock)
    silent = [raw(daemon) for _ in range(CONNECTIONS_MAX + 8)]
    eventually(lambda: sum(map(is_closed, silent)) >= 8, 10, "those too many to be closed")
    assert ask_tls(guarded, "/healthz")[0] == 200, "with all places taken by silence"
    for sock in silent:
        sock.close()


def test_a_tls_caller_that_sends_no_more_is_ended_and_nothing_is_said(guarded: Any) -> None:
    """There is no half of a TLS connection: asyncio ends it, and would warn of whoever asked it not to."""
    daemon, trust = guarded
    with raw(daemon) as sock, trust.wrap_socket(sock, server_hostname="127.0.0.1") as tls:
        tls.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        descriptor = os.dup(tls.fileno())
        tls.shutdown(socket.SHUT_WR)
        with socket.socket(fileno=descriptor) as plain:
            plain.settimeout(EXCHANGE_S * 2)
            until_closed(plain)
    assert "eof_received" not in daemon.output()
    assert ask_tls(guarded, "/healthz")[0] == 200


# -- who asks badly


GARBAGE = {
    "random bytes": b"\xff" + os.urandom(600),
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a request without a version": b"GET /metrics\r\n\r\n",
    "a version before the first": b"GET /metrics HTTP/0.9\r\n\r\n",
    "a version that is none": b"GET /metrics HTTP/7.7\r\nHost: x\r\n\r\n",
    "a version of another major number": b"GET /metrics HTTP/2.0\r\nHost: x\r\n\r\n",
    "a header without a colon": b"GET /metrics HTTP/1.1\r\nAuthorization Bearer secret-in-a-wrong-place\r\n\r\n",
    "two lengths": b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a TLS handshake": bytes.fromhex("16030100c8010000c40303") + os.urandom(200),
}
UNFINISHED = {
    "nothing": b"",
    "no request line": b"\r\n\r\n\r\n",
    "half a request line": b"GET /metr",
    "half the headers": b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer secret-in-h",
}


def answer_to(daemon: RunningDaemon, data: bytes, *, half_closed: bool) -> bytes:
    """What comes back; where `half_closed`, the end of what is sent lies there together with it."""
    if half_closed:
        daemon.pause()
    try:
        sock = raw(daemon, data)
        if half_closed:
            sock.shutdown(socket.SHUT_WR)
    finally:
        daemon.resume()
    with sock:
        return until_closed(sock)


@pytest.mark.parametrize("half_closed", [False, True])
@pytest.mark.parametrize("what", GARBAGE)
def test_what_is_no_request_is_refused_and_not_logged(node: RunningDaemon, what: str, half_closed: bool) -> None:
    """With 400 in a version that there is, or by the end of the connection; never with a page."""
    before = len(node.output())
    got = answer_to(node, GARBAGE[what], half_closed=half_closed)
    assert not got or got.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), got[:80]
    assert got.count(b"HTTP/") <= 1
    assert b"kvstored_" not in got
    assert ask(node, "/healthz")[0] == 200
    said = node.output()[before:]
    assert "Traceback" not in said
    assert "secret" not in said


@pytest.mark.parametrize("what", UNFINISHED)
def test_who_sends_no_more_before_a_whole_request_is_closed_at_once(node: RunningDaemon, what: str) -> None:
    before, began = len(node.output()), time.monotonic()
    assert answer_to(node, UNFINISHED[what], half_closed=True) == b""
    assert time.monotonic() - began < EXCHANGE_S * 0.8, "not at the end of its time"
    assert "secret" not in node.output()[before:]


@pytest.mark.parametrize("page", ["/", "/healthz", "/metrics", "/readyz"])
def test_who_sends_no_more_after_a_whole_request_is_answered(node: RunningDaemon, page: str) -> None:
    for version in (b"1.1", b"1.0"):
        request = b"GET %s HTTP/%s\r\nHost: x\r\n\r\n" % (page.encode(), version)
        head, _, body = answer_to(node, request, half_closed=True).partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/%s 200" % version, b"HTTP/%s 503" % version)), "/readyz of a daemon that slept"
        assert f"Content-Length: {len(body)}".encode() in head
        assert body


def test_a_request_larger_than_allowed_ends_its_connection(node: RunningDaemon) -> None:
    for data in (
        b"GET /" + b"a" * 2 * REQUEST_BYTES_MAX,
        b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: %s\r\n" % (i, b"x" * 100) for i in range(300)),
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000,
    ):
        with socket.create_connection(place(node), timeout=20) as sock:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(data)
            until_closed(sock)
    assert ask(node, "/healthz")[0] == 200


def test_requests_sent_ahead_are_answered_once(node: RunningDaemon) -> None:
    """A thousand of them would be a thousand answers for whoever reads none."""
    with raw(node, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 300) as sock:
        assert until_closed(sock).count(b"HTTP/1.1 200") <= 1


def test_no_port_is_shared_and_the_holder_is_named(node: RunningDaemon, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=rf"server.http: cannot listen on .*: pid {node.pid} .* listens there"):
        RunningDaemon(tmp_path, {"server.http": node.http_url.removeprefix("http://")})


IMPATIENT = """
from kvstore.cli.entry import kvstored
from kvstore.server import http

http.EXCHANGE_S = 2.0
kvstored()
"""
IMPATIENT_S = 2.0


class ImpatientDaemon(RunningDaemon):
    """The daemon itself, with less time for an exchange: what is tried is that it ends."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", IMPATIENT, *super().command()[1:]]


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[RunningDaemon]:
    daemon = ImpatientDaemon(tmp_path, {"server.http": "127.0.0.1:0"})
    try:
        yield daemon
    finally:
        daemon.kill()


def test_slow_and_silent_callers_are_ended_and_others_served_meanwhile(impatient: RunningDaemon) -> None:
    """Half a request for ever; a caller that reads nothing; and more connections than there are places."""
    node = impatient
    eventually(lambda: ask(node, "/healthz")[0] == 200)
    at_rest = descriptors(node.pid)
    slow = [raw(node, b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ") for _ in range(CONNECTIONS_MAX - 4)]
    deaf = raw(node)
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert ask(node, "/healthz")[0] == 200, "places are left"
    began = time.monotonic()
    last = raw(node, b"GET")
    for sock in [*slow, last]:
        until_closed(sock)
        sock.close()
    assert IMPATIENT_S * 0.8 < time.monotonic() - began < IMPATIENT_S + 10
    deaf.close()
    eventually(lambda: descriptors(node.pid) <= at_rest, 5, "all connections to be gone")
    assert ask(node, "/healthz")[0] == 200


@pytest.mark.parametrize("silence", [b"", b"GET /metrics HTTP/1.1\r\nX-Slow: "])
def test_silence_in_a_loop_keeps_nobody_away(node: RunningDaemon, silence: bytes) -> None:
    """As many silent connections as there are places, each begun again as soon as it is closed; pages are answered."""
    over = threading.Event()

    def hold() -> int:
        begun = 0
        held: list[socket.socket] = []
        while not over.is_set():
            for sock in filter(is_closed, list(held)):
                sock.close()
                held.remove(sock)
            while len(held) < CONNECTIONS_MAX:
                held.append(raw(node, silence))
                begun += 1
            over.wait(0.002)
        for sock in held:
            sock.close()
        return begun

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        try:
            for _ in range(20):
                for page in ("/healthz", "/readyz", "/metrics"):
                    assert answered(node, page) in (200, 503)
        finally:
            over.set()
        assert holding.result() >= CONNECTIONS_MAX + 20, "all places were taken, again and again"


def answered(daemon: RunningDaemon, page: str) -> int | None:
    """Asked by who may be slower between connecting and asking than the others connect: so not only once."""
    for _ in range(5):
        with contextlib.suppress(OSError, http.client.BadStatusLine):
            return ask(daemon, page)[0]
    return None


def test_the_longest_silence_makes_room_and_who_has_asked_keeps_its_place(tmp_path: Path) -> None:
    """Who has asked waits here for an answer that does not come: it is older than all the silence, and stays."""
    text = (
        "import asyncio\nfrom kvstore.server import http\n"
        + WAITING
        + "from kvstore.cli.entry import kvstored\nkvstored()"
    )
    command = [sys.executable, "-c", text]
    waiting = type("Waiting", (RunningDaemon,), {"command": lambda self: command + RunningDaemon.command(self)[1:]})
    daemon = waiting(tmp_path, {"server.http": "127.0.0.1:0"})
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    with contextlib.ExitStack() as over:
        over.callback(daemon.kill)

        def connections(count: int, data: bytes = b"") -> list[socket.socket]:
            return [over.enter_context(raw(daemon, data)) for _ in range(count)]

        asked = connections(4, request)
        eventually(lambda: daemon.output().count("asked and waits") == 4)
        silent = connections(CONNECTIONS_MAX - 4 + 8)
        eventually(lambda: all(map(is_closed, silent[:8])), 5, "the oldest to have made room")
        assert not any(map(is_closed, asked + silent[8:]))
        assert ask(daemon, "/healthz")[0] == 200
        connections(CONNECTIONS_MAX - 4, request)
        eventually(lambda: daemon.output().count("asked and waits") == CONNECTIONS_MAX)
        (late,) = connections(1)
        assert until_closed(late) == b"", "all places have asked: the newcomer is refused"
        daemon.says("an HTTP connection too many")
        assert not any(map(is_closed, asked))


WAITING = """
async def wait(self, request):
    print("asked and waits", flush=True)
    await asyncio.Future()

http.PAGES["/"] = wait
http.EXCHANGE_S = 60.0
"""


def is_closed(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP | select.POLLHUP)
    return bool(poll.poll(0))


# -- a scrape in a loop


def test_scrapes_in_a_loop_slow_down_nobody(node: RunningDaemon) -> None:
    """Eight scrapers without a pause; meanwhile puts are quick and the control plane answers at once."""
    over = threading.Event()
    answered = [0] * 8

    def scrape(number: int) -> None:
        while not over.is_set():
            assert ask(node, "/metrics" if number % 4 else "/readyz")[0] in (200, 503)
            answered[number] += 1

    puts: list[float] = []
    calls: list[float] = []
    memory = anonymous_bytes(node.pid)
    with ThreadPoolExecutor(8) as scrapers, Client(node.endpoint) as client:
        ns = client.raw_namespace("scraped", BLOCK)
        tasks = [scrapers.submit(scrape, number) for number in range(8)]
        try:
            until = time.monotonic() + 3.0
            while time.monotonic() < until:
                name = f"{len(puts)}"
                puts.append(timed(lambda n=name: ns.put([ns.key(n.encode())], [block(n, BLOCK)])))  # type: ignore[misc]
                if len(puts) % 16 == 0:
                    calls.append(timed(client.health))
        finally:
            over.set()
        for task in tasks:
            task.result()
    assert min(answered) > 5, "all of them were answered"
    assert sum(answered[n] for n in range(8) if n % 4) < 3.5 * 11 * 6, "not more often than is good for the others"
    assert max(calls) < 0.5
    assert sorted(puts)[int(len(puts) * 0.99)] < 0.25
    assert anonymous_bytes(node.pid) - memory < 32 << 20


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def test_a_scrape_is_never_older_than_the_question(node: RunningDaemon) -> None:
    """Though there are at most ten a second."""

    def stored() -> float:
        body = ask(node, "/metrics")[2].decode()
        return sum(float(line.split()[1]) for line in body.splitlines() if line.startswith("kvstored_blocks"))

    with Client(node.endpoint) as client:
        ns = client.raw_namespace("fresh", BLOCK)
        for i in range(5):
            before = stored()
            assert ns.put([ns.key(b"%d" % i)], [block(i, BLOCK)]).stored == 1
            assert stored() == before + 1
