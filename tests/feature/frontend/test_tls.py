"""HTTPS of the frontend and the standalone router."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from certificates import Authority
from service import DEADLINE_S, Process, until
from support_frontend import CHAT, DONE, Mocker, Raw

CHATTED = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


class Pair:
    """A certificate of this host, its key, and somebody who trusts them."""

    def __init__(self, folder: Path, authority: Authority | None = None) -> None:
        authority = authority or Authority(folder)
        self.cert, self.key = authority.pair("127.0.0.1")
        self.flags = ("--tls-cert-path", self.cert, "--tls-key-path", self.key)
        self.trust = ssl.create_default_context(cafile=authority.ca)
        self.trust.set_alpn_protocols(["h2", "http/1.1"])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def mocker() -> Iterator[Mocker]:
    with Mocker("--speedup-ratio", "1000") as mocker:
        yield mocker


@pytest.fixture
def address(pair: Pair, mocker: Mocker) -> Iterator[tuple[str, int]]:
    """Where a frontend before one engine serves HTTPS."""
    common = ("--port", "0", "--host", "127.0.0.1", "--discovery", "none", "--log-level", "error")
    process = Process("kvflash.frontend", *common, *pair.flags, "--worker", mocker.url)
    try:
        scheme, _, rest = str(process.ready()["url"]).partition("://")
        assert scheme == "https"
        host, _, port = rest.partition(":")
        found = (host, int(port))
        until(lambda: ask(found, pair, "GET", "/ready")[0] == 200, "the engine to be healthy")
        yield found
    finally:
        process.close()


def connect(address: tuple[str, int], pair: Pair) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection(*address, timeout=DEADLINE_S, context=pair.trust)


def ask(
    address: tuple[str, int], pair: Pair, method: str, path: str, body: Any = None
) -> tuple[int, bytes]:
    connection = connect(address, pair)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_answers_and_streams_come_encrypted(address: tuple[str, int], pair: Pair) -> None:
    connection = connect(address, pair)
    headers = {"Content-Type": "application/json"}
    for _ in range(3):  # All on one connection.
        connection.request("POST", CHAT, json.dumps({**CHATTED, "stream": True}), headers)
        response = connection.getresponse()
        assert response.status == 200 and response.getheader("x-kvflash-worker") == "1:0"
        body = response.read()
        assert body.endswith(DONE) and body.count(b"data: ") >= 6
    # Larger than any buffer on the way.
    long = [{"role": "user", "content": "word " * 200_000}]
    connection.request("POST", CHAT, json.dumps({**CHATTED, "messages": long}), headers)
    assert json.loads(connection.getresponse().read())
    connection.close()


def test_the_certificate_is_shown_and_http_1_1_agreed_on(
    address: tuple[str, int], pair: Pair
) -> None:
    with (
        socket.create_connection(address, timeout=DEADLINE_S) as plain,
        pair.trust.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted,
    ):
        assert encrypted.selected_alpn_protocol() == "http/1.1"
        assert encrypted.version() in ("TLSv1.2", "TLSv1.3")
    # A client that does not trust the authority says so.
    with (
        socket.create_connection(address, timeout=DEADLINE_S) as plain,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        ssl.create_default_context().wrap_socket(plain, server_hostname="127.0.0.1")


def test_those_that_speak_no_tls_or_nothing_hold_up_nobody(
    address: tuple[str, int], pair: Pair
) -> None:
    silent = [Raw(address) for _ in range(20)]
    try:
        with Raw(address) as plain:
            plain.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = plain.read_to_end()
            assert b"HTTP/1.1" not in answer
        with Raw(address) as half:
            half.send(b"\x16\x03\x01\x02\x00\x01")
            assert ask(address, pair, "GET", "/health")[0] == 200
        # Their handshake has a deadline: each one is hung up on.
        for one in silent:
            assert one.read_to_end() == b""
        assert ask(address, pair, "POST", CHAT, CHATTED)[0] == 200
    finally:
        for one in silent:
            one.socket.close()


def shown(address: tuple[str, int], pair: Pair) -> bytes:
    """The certificate that a new connection gets."""
    with (
        socket.create_connection(address, timeout=DEADLINE_S) as plain,
        pair.trust.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted,
    ):
        return encrypted.getpeercert(binary_form=True) or b""


def counted(address: tuple[str, int], pair: Pair, name: str, outcome: str) -> float:
    metrics = ask(address, pair, "GET", "/metrics")[1].decode()
    wanted = f'kvflash_tls_{name}_total{{outcome="{outcome}"}} '
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(wanted))


def test_a_new_certificate_is_taken_and_a_broken_one_is_not(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = Pair(tmp_path, authority)
    process = Process("kvflash.router", "--port", "0", "--host", "127.0.0.1", *pair.flags)
    try:
        host, _, port = str(process.ready()["url"]).removeprefix("https://").partition(":")
        address = (host, int(port))
        first = shown(address, pair)
        kept = connect(address, pair)
        kept.request("GET", "/health")
        kept.getresponse().read()
        authority.pair("127.0.0.1")  # Into the same files.

        def is_new() -> bool:
            kept.request("GET", "/health")  # An open connection goes on.
            assert kept.getresponse().read()
            return shown(address, pair) != first

        until(is_new, "the new certificate")
        second = shown(address, pair)
        kept.request("GET", "/health")
        assert kept.getresponse().read()
        kept.close()

        Path(pair.cert).write_text("no certificate")
        until(lambda: counted(address, pair, "renewals", "refused") >= 1, "the refusal")
        assert shown(address, pair) == second
        kept = connect(address, pair)
        kept.request("GET", "/health")
        causes = json.loads(kept.getresponse().read())["causes"]
        kept.close()
        (cause,) = [one for one in causes if one["code"] == "tls"]
        assert pair.cert in cause["message"]
        assert cause["fix"].startswith("correct the file")
        assert counted(address, pair, "renewals", "renewed") >= 1
        assert counted(address, pair, "handshakes", "done") >= 4
        with Raw(address) as plain:
            plain.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            plain.read_to_end()
        assert counted(address, pair, "handshakes", "failed") == 1
        authority.pair("127.0.0.1")
        until(lambda: shown(address, pair) != second, "the certificate behind the broken one")
    finally:
        process.close()
    errors = "".join(process.errors)
    assert f"--tls-cert-path {pair.cert}: holds no certificate in PEM" in errors, errors


def test_the_router_serves_it_too(pair: Pair) -> None:
    process = Process("kvflash.router", "--port", "0", "--host", "127.0.0.1", *pair.flags)
    try:
        host, _, port = str(process.ready()["url"]).removeprefix("https://").partition(":")
        assert ask((host, int(port)), pair, "GET", "/health")[0] in (200, 503)
    finally:
        process.close()


def refused(service: str, *flags: str) -> str:
    process = Process(service, "--port", "0", *flags)
    try:
        assert process.popen.wait(30) == 2
    finally:
        process.close()
    return "".join(process.errors)


@pytest.mark.parametrize("service", ["kvflash.frontend", "kvflash.router"])
def test_files_that_can_not_work_are_named_before_anything_starts(
    service: str, pair: Pair, tmp_path: Path
) -> None:
    empty, other = tmp_path / "empty.pem", Pair(tmp_path / "other")
    empty.write_text("no certificate")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    gone = str(tmp_path / "gone.pem")
    cert, key = "--tls-cert-path", "--tls-key-path"
    for flags, text in (
        ((cert, pair.cert), f"{cert} needs {key}, which is missing"),
        ((key, pair.key), f"{key} needs {cert}, which is missing"),
        ((cert, gone, key, pair.key), f"{cert} {gone}: can't be read: No such file"),
        ((cert, pair.cert, key, gone), f"{key} {gone}: can't be read: No such file"),
        ((cert, str(empty), key, pair.key), f"{cert} {empty}: holds no certificate in PEM"),
        (
            (cert, pair.cert, key, str(empty)),
            f"{key} {empty}: holds no private key in PEM without a passphrase",
        ),
        ((cert, str(broken), key, pair.key), f"{cert} {broken}: can't be used"),
        ((cert, pair.cert, key, other.key), f"{key} {other.key}: is not the key of {cert}"),
    ):
        error = refused(service, *flags)
        assert text in error, error
        assert "Traceback" not in error
