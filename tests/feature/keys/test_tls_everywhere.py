"""HTTPS to engines and indexers, with certificates on both sides."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from certificates import Authority
from kvflash.doctor.app import main as doctor
from kvflash.errors import ConfigError
from kvflash.indexer import IndexerService
from kvflash.indexer.args import parse_args as indexer_args
from kvflash.keys import main as keys_command
from kvflash.workers import main as workers
from service import Http, until
from spy import Spy
from support_frontend import CHAT, Frontend


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def engine(authority: Authority) -> Iterator[str]:
    """An engine over HTTPS that wants a certificate of its clients."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    context.load_cert_chain(*authority.pair("127.0.0.1"))
    context.verify_mode = ssl.CERT_REQUIRED
    spy = Spy(context)
    yield spy.url
    spy.close()


def test_an_engine_is_reached_over_mutual_tls(engine: str, authority: Authority) -> None:
    cert, key = authority.pair("frontend")
    flags = ("--tls-ca-path", authority.ca, "--worker", engine)
    own = ("--tls-client-cert-path", cert, "--tls-client-key-path", key)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with Frontend(*flags, *own) as frontend:
        until(lambda: frontend.http.call("GET", "/ready")[0] == 200, "the engine to be healthy")
        assert frontend.http.call("POST", CHAT, body)[0] == 200
    # Without a certificate of its own it is not let in, and says so.
    with Frontend(*flags) as frontend:
        (worker,) = until_known(frontend)
        assert not worker["healthy"]


def until_known(frontend: Frontend) -> list[dict[str, Any]]:
    """The workers, once each has failed."""

    def have_failed() -> bool:
        return all(one["last_error"] for one in frontend.workers().values())

    until(have_failed, "the worker to fail")
    return list(frontend.workers().values())


def test_an_engine_of_another_authority_is_not_trusted(engine: str, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    with Frontend("--tls-ca-path", other.ca, "--worker", engine) as frontend:
        (worker,) = until_known(frontend)
        assert not worker["healthy"]
        assert "certificate" in worker["last_error"], worker["last_error"]


def test_an_engine_that_shows_the_certificate_of_a_ca_is_told_so(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).own()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    spy = Spy(context)
    with Frontend("--tls-ca-path", cert, "--worker", spy.url) as frontend:
        (worker,) = until_known(frontend)
        assert "its certificate is that of a CA" in worker["last_error"], worker["last_error"]
        assert "CA:FALSE" in worker["last_error"]
    spy.close()


def test_a_peer_is_recovered_from_over_https(authority: Authority) -> None:
    cert, key = authority.pair("127.0.0.1")
    common = ["--host", "127.0.0.1", "--port", "0"]
    encrypted = indexer_args([*common, "--tls-cert-path", cert, "--tls-key-path", key])
    with IndexerService(encrypted) as first:
        assert first.url.startswith("https://")
        trust = ssl.create_default_context(cafile=authority.ca)
        http = Http(first.url, tls=trust)
        body = {"instance_id": 1, "endpoint": "tcp://127.0.0.1:1", "model_name": "m"}
        http.post("/register", {**body, "block_size": 4}, expect=201)
        assert b"tls_handshakes" in http.get("/metrics")
        http.close()
        flags = [*common, "--peers", first.url, "--tls-ca-path", authority.ca]
        with IndexerService(indexer_args(flags)) as second:
            http = Http(second.url)
            until(
                lambda: http.call("GET", "/ready")[1]["recovery"]["phase"] == "done",
                "the recovery to end",
            )
            recovery = http.call("GET", "/ready")[1]["recovery"]
            assert recovery["peer"] == first.url, recovery
            http.close()


def test_tools_say_what_https_lacks(
    tmp_path: Path,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cert, key = authority.pair("127.0.0.1")
    tls = ["--host", "127.0.0.1", "--port", "0", "--tls-cert-path", cert, "--tls-key-path", key]
    monkeypatch.setenv("SSL_CERT_FILE", Authority(tmp_path / "other").ca)
    with IndexerService(indexer_args(tls)) as indexer:
        plain = indexer.url.replace("https", "http")
        named = indexer.url.replace("127.0.0.1", "localhost")
        for url, seen, fix in (
            (indexer.url, "the certificate is not trusted here: ", "set SSL_CERT_FILE to the file"),
            (plain, "this port does not speak HTTP", f"if it speaks TLS, use {indexer.url}"),
            (named, "not valid for 'localhost'", "give a URL with a name of the certificate"),
        ):
            if url == named:
                monkeypatch.setenv("SSL_CERT_FILE", authority.ca)
            assert workers([url]) == 1
            told = capsys.readouterr().err.rstrip("\n")
            assert f"{url}/workers: " in told and seen in told and f"; {fix}" in told
            assert told.isprintable() and "does the service run" not in told
            assert doctor([url]) == 1
            told = capsys.readouterr().out.splitlines()[0]
            assert seen in told and f" | fix: {fix}" in told and told.isprintable()
        assert workers([indexer.url]) == 0
        capsys.readouterr()
    with IndexerService(indexer_args(tls[:4])) as indexer:
        secure = indexer.url.replace("http", "https")
        assert workers([secure]) == 1
        told = capsys.readouterr().err
        assert f"this port does not speak TLS; if it speaks HTTP, use {indexer.url}" in told


def test_a_certificate_stands_for_a_key(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.pair("127.0.0.1")
    keys = tmp_path / "keys"
    assert keys_command(["add", "Ann.internal", "--role", "admin", "--keys-file", str(keys),
                         "--certificate"]) == 0  # fmt: skip
    tls = ["--host", "127.0.0.1", "--port", "0", "--tls-cert-path", cert, "--tls-key-path", key]
    flags = [*tls, "--keys-file", str(keys)]
    with pytest.raises(ConfigError, match="--tls-client-ca-path is not set"):
        IndexerService(indexer_args(flags))
    with IndexerService(indexer_args([*flags, "--tls-client-ca-path", authority.ca])) as indexer:

        def status(shown: tuple[str, str] | None, headers: dict[str, str] | None = None) -> int:
            trust = ssl.create_default_context(cafile=authority.ca)
            if shown:
                trust.load_cert_chain(*shown)
            http = Http(indexer.url, tls=trust)
            try:
                return int(http.call("GET", "/workers", headers=headers)[0])
            finally:
                http.close()

        ann = authority.pair("ann.internal")
        assert status(ann) == 200
        assert status(None) == 401
        assert status(authority.pair("bob.internal")) == 401
        # A key counts before a certificate, and a page in Ann's browser has no key.
        assert status(ann, {"authorization": "Bearer wrong"}) == 401
        assert (
            status(ann, {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}) == 403
        )
        with pytest.raises((ssl.SSLError, ConnectionError)):
            status(Authority(tmp_path / "other").pair("ann.internal"))


def test_authorities_of_clients_need_a_certificate_of_the_service(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="--tls-client-ca-path needs --tls-cert-path"):
        IndexerService(indexer_args(["--port", "0", "--tls-client-ca-path", authority.ca]))
