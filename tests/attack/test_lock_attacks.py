"""Attacks on a service: adding workers, reading keys, writing from web pages."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvflash.indexer import IndexerService
from kvflash.indexer.args import parse_args as indexer_args
from kvflash.router import RouterService
from kvflash.router import parse_args as router_args
from service import Http, until
from spy import Spy
from support_frontend import CHAT, Frontend


@contextmanager
def spy() -> Iterator[Spy]:
    made = Spy()
    try:
        yield made
    finally:
        made.close()


def _line(key_id: str, role: str) -> str:
    """A line of a file of keys; the key is the id."""
    digest = hashlib.sha256(b"\0" * 16 + key_id.encode()).hexdigest()
    return f"{key_id}:sha256${'00' * 16}${digest}:{role}\n"


def _own_address() -> str:
    """An address of this machine that is not its loopback; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but its loopback")
        return str(probe.getsockname()[0])


def test_the_admin_side_is_closed_to_other_machines() -> None:
    address = _own_address()
    frontend = Frontend(host="0.0.0.0")
    router = RouterService(router_args(["--host", "0.0.0.0", "--port", "0"]))
    indexer = IndexerService(indexer_args(["--host", "0.0.0.0", "--port", "0"]))
    asked = {
        "frontend": ("/workers", "/explain", "/busy_threshold"),
        "router": ("/workers", "/select", "/reserve", "/free", "/report_load", "/"),
        "indexer": ("/register", "/unregister", "/query", "/query_by_hash", "/register_peer"),
    }
    with frontend, router, indexer:
        for service, url in (
            ("frontend", frontend.url),
            ("router", router.url),
            ("indexer", indexer.url),
        ):
            port = url.rpartition(":")[2]
            elsewhere, here = Http(f"http://{address}:{port}"), Http(f"http://127.0.0.1:{port}")
            for path in asked[service]:
                status, answer, _ = elsewhere.call("POST", path, {})
                assert status == 403, (service, path, answer)
                assert "--open-admin" in str(answer)
                assert here.call("POST", path, {})[0] != 403, (service, path)
            assert elsewhere.call("GET", "/metrics")[0] == 200
            elsewhere.close()
            here.close()


def test_an_added_worker_is_shown_no_key_but_its_own(tmp_path: Path) -> None:
    (tmp_path / "engines").write_text("of the engines")
    (tmp_path / "keys").write_text(_line("ann", "admin") + _line("bob", "client"))
    flags = ("--worker-api-key-file", str(tmp_path / "engines"))
    keys = ("--keys-file", str(tmp_path / "keys"))
    ann, bob = {"authorization": "Bearer ann"}, {"authorization": "Bearer bob"}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with ExitStack() as stack:
        named, added, own = (stack.enter_context(spy()) for _ in range(3))
        frontend = stack.enter_context(Frontend(*flags, *keys, "--worker", named.url))
        call = frontend.http.call
        more = {"api_key": "its own"}
        assert call("POST", "/workers", {"url": added.url}, headers=ann)[0] == 201
        status, answer, _ = call("POST", "/workers", {"url": own.url, **more}, headers=ann)
        assert status == 201
        assert "its own" not in str(answer)
        until(
            lambda: all(one.shown("/v1/models") for one in (named, added, own)),
            "the workers to be asked",
        )
        until(lambda: call("POST", CHAT, body, headers=bob)[0] == 200, "a worker to serve")
        for _ in range(30):
            assert call("POST", CHAT, body, headers=bob)[0] == 200
        assert named.shown("/health") == {"Bearer of the engines"}
        assert added.shown("/health") == {None}
        assert own.shown("/health") == {"Bearer its own"}
        # Nor is a client's key: those of flags get the frontend's in its place.
        assert named.shown(CHAT) <= {"Bearer of the engines"}
        assert added.shown(CHAT) <= {None}
        assert own.shown(CHAT) <= {"Bearer its own"}
        assert any(one.shown(CHAT) for one in (named, added, own))


def test_workers_that_are_added_are_where_they_may_be() -> None:
    with Frontend("--worker-allow", "127.0.0.1,10.0.0.0/8") as frontend:
        for worker, status in (
            ({"url": "http://169.254.169.254/latest"}, 403),
            ({"url": "http://[fe80::1]:80"}, 403),
            ({"url": "http://192.0.2.1:80"}, 403),
            ({"url": "http://127.0.0.1:9", "events": "ipc:///tmp/x"}, 400),
            ({"url": "http://127.0.0.1:9", "events": "tcp://169.254.1.1:1"}, 403),
            ({"url": "http://127.0.0.1:9", "events": "tcp://10.0.0.1:1"}, 201),
        ):
            answered = frontend.http.call("POST", "/workers", worker)
            assert answered[0] == status, (worker, answered)
    with IndexerService(indexer_args(["--host", "127.0.0.1", "--port", "0"])) as indexer:
        http = Http(indexer.url)
        body = {"instance_id": 1, "model_name": "m", "block_size": 4}
        for endpoint, status in (
            ("ipc:///tmp/x", 400),
            ("inproc://x", 400),
            ("tcp://169.254.169.254:80", 403),
            ("tcp://127.0.0.1:1", 201),
        ):
            answered = http.call("POST", "/register", {**body, "endpoint": endpoint})
            assert answered[0] == status, (endpoint, answered)
        http.close()


def test_web_pages_change_nothing() -> None:
    with Frontend() as frontend:
        port = frontend.url.rpartition(":")[2]
        body = b'{"url": "http://127.0.0.1:9"}'
        for headers in (
            {"content-type": "text/plain", "origin": "http://evil.example"},
            {"content-type": "text/plain", "origin": "null"},
            {"content-type": "text/plain", "sec-fetch-site": "cross-site"},
            {"host": f"evil.example:{port}"},
            {"host": f"evil.example:{port}", "origin": f"http://evil.example:{port}"},
        ):
            status, answer, _ = frontend.http.call("POST", "/workers", body, headers=headers)
            assert status == 403, (headers, answer)
        assert frontend.http.call("GET", "/workers", headers={"host": "evil.example"})[0] == 403
        assert frontend.http.get("/workers") == []
        # curl -d.
        form = {"content-type": "application/x-www-form-urlencoded"}
        assert frontend.http.call("POST", "/workers", body, headers=form)[0] == 201


def test_a_peer_is_asked_with_the_service_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("of the peer")
    flags = ["--host", "127.0.0.1", "--port", "0", "--service-key-file", str(tmp_path / "key")]
    with spy() as peer, IndexerService(indexer_args([*flags, "--peers", peer.url])):
        until(lambda: peer.shown("/dump?format=snapshot"), "the peer to be asked")
        assert peer.shown("/ready") == {"Bearer of the peer"}
