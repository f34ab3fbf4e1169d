"""Logging in at a real NATS, in every way that the environment can name, and being refused."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import nats.errors
import nkeys
import pytest

from certificates import Authority, NatsOperator
from kvflash import DistributedRuntime
from kvflash.errors import ConfigError, KvflashError, TransportError
from kvflash.nats_login import failure
from kvflash.runtime.nats import connect as runtime_connect
from kvflash.servers import NatsSettings
from kvflash.transport.jetstream import JetStreamLog
from kvflash.transport.nats_connection import check_server, connect
from servers import NatsServer, outlet
from service import until

HOST = "127.0.0.1"
ANY_LOGIN = (
    r"refuses the login.*NATS_AUTH_USERNAME and NATS_AUTH_PASSWORD, NATS_AUTH_TOKEN, "
    r"NATS_AUTH_NKEY or NATS_AUTH_CREDENTIALS_FILE$"
)
Start = Callable[[str], NatsServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a server with this configuration; it ends with the test."""
    servers: list[NatsServer] = []

    def make(config: str) -> NatsServer:
        folder = tmp_path / str(len(servers))
        folder.mkdir()
        file = folder / "nats.conf"
        file.write_text(config)
        servers.append(NatsServer(folder, ["-c", str(file)]))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def refusal(env: dict[str, str]) -> KvflashError:
    """How both doors to NATS, that of the state and that of requests, refuse: with the same."""
    with pytest.raises(KvflashError) as first:
        check_server(NatsSettings.from_env(env))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        with pytest.raises(KvflashError) as second:
            asyncio.run(ask_as_a_client())
    assert type(first.value) is type(second.value), (first.value, second.value)
    assert str(first.value) == str(second.value)
    assert "\n" not in str(first.value)
    return first.value


async def ask_as_a_client() -> None:
    """Over the request plane, between our own processes only."""
    async with DistributedRuntime("mem", "nats") as runtime:
        endpoint = runtime.endpoint("t.login.run")

        async def handler(request: int) -> int:
            return request

        serving = asyncio.create_task(endpoint.serve_endpoint(handler))
        client = await endpoint.client()
        known = asyncio.create_task(client.wait_for_instances())
        await asyncio.wait({serving, known}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            known.cancel()
            await serving
        stream = await client.generate(7)
        assert [item async for item in stream] == [7]
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def serves(env: dict[str, str]) -> None:
    """State and requests are there: JetStream takes a message, an answer comes back."""

    async def store() -> None:
        settings = NatsSettings.from_env(env)
        client = await connect(settings, name="test")
        try:
            log = JetStreamLog(client, "stream", settings)
            await log.ensure()
            stored = await log.append({}, b"x", key=secrets.token_hex())
            assert (await log.state()).last == stored
        finally:
            await client.close()

    asyncio.run(store())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        asyncio.run(ask_as_a_client())


def test_a_missing_server_is_one_line_that_says_what_to_start() -> None:
    with pytest.raises(TransportError, match=r"start one .nats-server -js.*--event-plane zmq"):
        check_server(NatsSettings.from_env({"NATS_SERVER": "nats://127.0.0.1:1"}))


def test_an_address_that_the_client_refuses_is_one_line() -> None:
    """The client raises before it opens a connection, and refuses to close what it never opened."""
    with pytest.raises(TransportError, match=r"no NATS server answers at none .*start one"):
        check_server(NatsSettings.from_env({"NATS_SERVER": "none"}))


def test_a_login_that_took_too_long_is_no_refusal() -> None:
    settings = NatsSettings.from_env({})
    for said, kind in (
        ("'Authentication Timeout'", TransportError),
        ("'User Authentication Expired'", ConfigError),
        ("'Authorization Violation'", ConfigError),
    ):
        error = nats.errors.Error(f"nats: {said}")
        assert type(failure(settings, error, "start one")) is kind


def test_user_and_key(start: Start, tmp_path: Path) -> None:
    pair, stranger = (
        nkeys.from_seed(nkeys.encode_seed(letter * 32, nkeys.PREFIX_BYTE_USER))
        for letter in (b"a", b"b")
    )
    users = f'[{{user: "u", password: "p"}}, {{nkey: "{pair.public_key.decode()}"}}]'
    where = {"NATS_SERVER": start(f"authorization {{ users = {users} }}").url}
    seed_file = tmp_path / "seed"
    # As an editor leaves it.
    seed_file.write_bytes(pair.seed + b"\n")
    serves({**where, "NATS_AUTH_USERNAME": "u", "NATS_AUTH_PASSWORD": "p"})
    serves({**where, "NATS_AUTH_NKEY": pair.seed.decode()})
    serves({**where, "NATS_AUTH_NKEY": str(seed_file)})
    for wrong in (
        {},
        {"NATS_AUTH_USERNAME": "u", "NATS_AUTH_PASSWORD": "secret"},
        {"NATS_AUTH_TOKEN": "secret"},
        {"NATS_AUTH_NKEY": stranger.seed.decode()},
    ):
        error = refusal({**where, **wrong})
        assert isinstance(error, ConfigError)
        assert "secret" not in str(error)
        with pytest.raises(ConfigError, match=ANY_LOGIN):
            raise error
    error = refusal({**where, "NATS_AUTH_NKEY": "SUNONSENSE"})
    assert str(error) == "NATS_AUTH_NKEY must be a seed that begins with SU, or a file with one"


def test_token(start: Start) -> None:
    where = {"NATS_SERVER": start('authorization { token: "secret" }').url}
    serves({**where, "NATS_AUTH_TOKEN": "secret"})
    with pytest.raises(ConfigError, match=ANY_LOGIN):
        raise refusal({**where, "NATS_AUTH_TOKEN": "other"})


def test_credentials_file_of_a_user_whom_the_server_has_never_seen(
    start: Start, tmp_path: Path
) -> None:
    operator, file = NatsOperator(), tmp_path / "user.creds"
    where = {"NATS_SERVER": start(operator.config()).url, "NATS_AUTH_CREDENTIALS_FILE": str(file)}
    file.write_text(operator.credentials("alice"))
    serves(where)
    # One's token with the other's seed.
    alice, bob = operator.credentials("alice"), operator.credentials("bob")
    file.write_text(alice[: alice.index("-----BEGIN USER")] + bob[bob.index("-----BEGIN USER") :])
    with pytest.raises(ConfigError, match=ANY_LOGIN):
        raise refusal(where)
    file.write_text("nonsense")
    with pytest.raises(ConfigError, match=r"NATS_AUTH_CREDENTIALS_FILE: .*user\.creds must hold"):
        raise refusal(where)


@pytest.mark.parametrize("wants_client", [False, True], ids=["server", "both"])
def test_tls(start: Start, tmp_path: Path, wants_client: bool) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    cert, key = ours.pair(HOST)
    tls = f'cert_file: "{cert}", key_file: "{key}", ca_file: "{ours.ca}", verify: {wants_client}'
    login = 'authorization { user: "u", password: "p" }'
    server = start(f"tls {{ {tls.replace('True', 'true').replace('False', 'false')} }}\n{login}")
    names = ("NATS_TLS_CERT", "NATS_TLS_KEY")
    env = {
        "NATS_SERVER": server.url,
        "NATS_AUTH_USERNAME": "u",
        "NATS_AUTH_PASSWORD": "p",
        "NATS_TLS_CA": ours.ca,
        **dict(zip(names, ours.pair("client"), strict=True)),
    }
    serves(env)
    serves({**env, "NATS_SERVER": server.url.replace("nats://", "tls://")})
    untrusted = r"untrusted certificate \(.*issuer.*\): set NATS_TLS_CA"
    with pytest.raises(ConfigError, match=untrusted):
        raise refusal({**env, "NATS_TLS_CA": theirs.ca})
    with pytest.raises(ConfigError, match=untrusted):
        raise refusal({name: env[name] for name in env if "TLS" not in name})
    with pytest.raises(ConfigError, match=r"Hostname mismatch.*a name in NATS_SERVER"):
        raise refusal({**env, "NATS_SERVER": server.url.replace(HOST, "localhost")})
    with pytest.raises(ConfigError, match=ANY_LOGIN):
        raise refusal({**env, "NATS_AUTH_PASSWORD": "other"})
    if wants_client:
        refused = r"refuses TLS \(.*ALERT.*\): set NATS_TLS_CERT and NATS_TLS_KEY"
        with pytest.raises(ConfigError, match=refused):
            raise refusal({name: env[name] for name in env if name not in names})
        with pytest.raises(ConfigError, match=refused):
            raise refusal({**env, **dict(zip(names, theirs.pair("client"), strict=True))})


def login(password: str) -> str:
    return f'authorization {{ user: "u", password: "{password}" }}'


def reload(server: NatsServer, config: str) -> None:
    """Give a running server another configuration; who is refused by it is thrown out."""
    log, told = server.folder / "log", "Reloaded server configuration"
    before = log.read_text().count(told)
    (server.folder / "nats.conf").write_text(config)
    assert server.popen is not None
    server.popen.send_signal(signal.SIGHUP)
    until(lambda: log.read_text().count(told) > before, "the other configuration")


@pytest.mark.parametrize("door", ["state", "requests"])
def test_who_is_thrown_out_comes_back_with_its_subscriptions(
    start: Start,
    door: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = start(login("p"))
    env = {"NATS_SERVER": server.url, "NATS_AUTH_USERNAME": "u", "NATS_AUTH_PASSWORD": "p"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("kvflash.runtime.nats.RECONNECT_PAUSE_S", 0.05)

    async def scenario() -> None:
        if door == "state":
            client = await connect(NatsSettings.from_env(env), name="test")
        else:
            client = await runtime_connect()
        heard = asyncio.Queue[bytes]()

        async def hear(message: Any) -> None:
            heard.put_nowait(message.data)

        await client.subscribe("news", cb=hear)
        await asyncio.to_thread(reload, server, login("other"))

        def is_refused() -> bool:
            return "refuses the login" in caplog.text or caplog.text.count("Violation") > 1

        await asyncio.to_thread(until, is_refused, "an attempt that is refused")
        assert not client.is_connected
        await asyncio.to_thread(reload, server, login("p"))
        while heard.empty():
            # Messages sent while it is down wait, or are sent when it comes back.
            await client.publish("news", b"x")
            await asyncio.sleep(0.02)
        await client.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_publisher_that_is_refused_stores_what_waits_once_it_is_not(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(login("other"))
    env = {"NATS_SERVER": server.url, "NATS_AUTH_USERNAME": "u", "NATS_AUTH_PASSWORD": "p"}
    settings = NatsSettings.from_env(env)
    with pytest.raises(ConfigError, match=ANY_LOGIN):
        outlet(settings=settings)
    reload(server, login("p"))
    with caplog.at_level(logging.WARNING), closing(outlet(settings=settings)) as writer:
        writer.put(b"a")
        assert writer.flush()
        reload(server, login("other"))
        until(lambda: "refuses the login" in caplog.text, "to be refused")
        writer.put(b"b")
        until(lambda: writer.stats()["errors_total"] > 1, "two attempts")
        reload(server, login("p"))
        assert writer.flush()
    assert caplog.text.count("events are not stored: ") == 1, "said once"
    assert writer.stats()["stored_batches_total"] == 2


def test_a_server_without_tls_hears_no_password(tmp_path: Path) -> None:
    heard: list[bytes] = []
    ours = Authority(tmp_path / "ours")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"auth_required": true, "max_payload": 1024}\r\n')
        heard.append(await reader.read())
        writer.close()

    async def scenario(extra: dict[str, str], scheme: str) -> None:
        server = await asyncio.start_server(answer, HOST, 0)
        port = server.sockets[0].getsockname()[1]
        login = {"NATS_AUTH_USERNAME": "u", "NATS_AUTH_PASSWORD": "secret"}
        env = {"NATS_SERVER": f"{scheme}://{HOST}:{port}", **login, **extra}
        with pytest.raises(ConfigError, match=r"does not offer TLS.*unset NATS_TLS_CA"):
            await connect(NatsSettings.from_env(env), name="test")
        server.close()

    for extra, scheme in (({"NATS_TLS_CA": ours.ca}, "nats"), ({}, "tls")):
        asyncio.run(scenario(extra, scheme))
    assert heard
    assert not any(heard), heard


def test_a_connection_goes_on_over_tls_when_the_server_comes_back(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    host, other = tmp_path / "host.pem", tmp_path / "host.key"

    def show(authority: Authority) -> None:
        for source, target in zip(authority.pair(HOST), (host, other), strict=True):
            target.write_bytes(Path(source).read_bytes())

    show(ours)
    server = start(f'tls {{ cert_file: "{host}", key_file: "{other}" }}')
    settings = NatsSettings.from_env({"NATS_SERVER": server.url, "NATS_TLS_CA": ours.ca})

    def is_refused() -> bool:
        return caplog.text.count("CERTIFICATE_VERIFY_FAILED") > 1

    async def scenario() -> None:
        client = await connect(settings, name="test")
        # In between it shows a certificate that we don't trust: that is no reason to give up.
        for authority in (theirs, ours):
            server.kill()
            show(authority)
            await asyncio.to_thread(server.start)
            if authority is theirs:
                await asyncio.to_thread(until, is_refused, "two attempts that are refused")
        await asyncio.to_thread(until, lambda: client.is_connected, "the connection")
        await client.flush()
        await client.close()

    with caplog.at_level(logging.DEBUG, "kvflash.nats_login"):
        asyncio.run(scenario())
