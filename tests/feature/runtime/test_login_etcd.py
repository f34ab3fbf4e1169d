"""Asking a real etcd that wants to know who asks, and being refused; logins are in the contract."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from certificates import Authority
from kvflash.discovery import Put, Synced, open_discovery
from kvflash.errors import ConfigError, TransportError
from kvflash.servers import TlsFiles
from servers import EtcdServer
from service import Http

HOST = "127.0.0.1"
CLIENT = ("ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY")
Start = Callable[..., EtcdServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start an etcd with these arguments; it ends with the test."""
    servers: list[EtcdServer] = []

    def make(*args: str, scheme: str = "http") -> EtcdServer:
        folder = tmp_path / str(len(servers))
        folder.mkdir()
        servers.append(EtcdServer(folder, args, scheme=scheme))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def put(env: dict[str, str], key: str = "k") -> None:
    """Write a key with a lease and see it in a watch, as a process with this environment does."""

    async def work() -> None:
        discovery = open_discovery("etcd")
        try:
            await discovery.put(key, b"v", await discovery.lease(10.0))
            watch = discovery.watch(key)
            assert [await asyncio.wait_for(anext(watch), 30) for _ in range(2)] == [
                Put(key, b"v"),
                Synced(),
            ]
        finally:
            await discovery.close()

    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        asyncio.run(work())


@pytest.mark.parametrize("wants_client", [False, True], ids=["server", "both"])
def test_tls(start: Start, tmp_path: Path, wants_client: bool) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    cert, key = ours.pair(HOST)
    client = ["--client-cert-auth", f"--trusted-ca-file={ours.ca}"] if wants_client else []
    server = start(f"--cert-file={cert}", f"--key-file={key}", *client, scheme="https")
    env = {
        "ETCD_ENDPOINTS": server.url,
        "ETCD_AUTH_CA": ours.ca,
        **dict(zip(CLIENT, ours.pair("client"), strict=True)),
    }
    put(env)
    # Where there are certificates, what is named without a scheme is https.
    put({**env, "ETCD_ENDPOINTS": server.url.removeprefix("https://")})
    untrusted = r"untrusted certificate \(.*issuer.*\): set ETCD_AUTH_CA"
    with pytest.raises(ConfigError, match=untrusted):
        put({**env, "ETCD_AUTH_CA": theirs.ca})
    with pytest.raises(ConfigError, match=untrusted):
        put({"ETCD_ENDPOINTS": server.url})
    with pytest.raises(ConfigError, match=r"Hostname mismatch.*a name in ETCD_ENDPOINTS"):
        put({**env, "ETCD_ENDPOINTS": server.url.replace(HOST, "localhost")})
    plain = server.url.replace("https://", "http://")
    with pytest.raises(TransportError, match=r"if it wants TLS, name it https:// in ETCD_ENDP"):
        put({"ETCD_ENDPOINTS": plain})
    with pytest.raises(ConfigError, match=r"ETCD_ENDPOINTS names http://.*requires TLS"):
        put({**env, "ETCD_ENDPOINTS": plain})
    if wants_client:
        refused = r"refuses TLS \(.*ALERT.*\): set ETCD_AUTH_CLIENT_CERT and ETCD_AUTH_CLIENT_KEY"
        with pytest.raises(ConfigError, match=refused):
            put({name: env[name] for name in env if name not in CLIENT})
        with pytest.raises(ConfigError, match=refused):
            put({**env, **dict(zip(CLIENT, theirs.pair("client"), strict=True))})


def test_tls_to_an_etcd_without(start: Start) -> None:
    url = start().url.replace("http://", "https://")
    with pytest.raises(TransportError, match="if it offers no TLS, name it http:// in ETCD_ENDP"):
        put({"ETCD_ENDPOINTS": url})


def test_a_login_over_tls_and_what_it_may_not(start: Start, tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    cert, key = ours.pair(HOST)
    tls = [f"--cert-file={cert}", f"--key-file={key}", "--client-cert-auth"]
    server = start(*tls, f"--trusted-ca-file={ours.ca}", scheme="https")
    env = {
        "ETCD_ENDPOINTS": server.url,
        "ETCD_AUTH_CA": ours.ca,
        **dict(zip(CLIENT, ours.pair("client"), strict=True)),
    }
    _make_users(server, ours)
    mine = {**env, "ETCD_AUTH_USERNAME": "app", "ETCD_AUTH_PASSWORD": "secret"}
    put(mine, "v1/k")
    with pytest.raises(ConfigError, match=r"refuses kv/put to user 'app'.*set ETCD_AUTH_USERNAME"):
        put(mine, "other/k")
    with pytest.raises(
        ConfigError,
        match=r"refuses .* to a client without a login.*set ETCD_AUTH_USERNAME and ETCD",
    ):
        put(env, "v1/k")
    with pytest.raises(ConfigError, match=r"refuses the login of 'app'.*ETCD_AUTH_PASSWORD$"):
        put({**mine, "ETCD_AUTH_PASSWORD": "other"}, "v1/k")


def _make_users(server: EtcdServer, ours: Authority) -> None:
    """One that may all, and one that may only what begins with v1/."""
    cert, key = ours.pair("admin")
    http = Http(server.url, tls=TlsFiles(ca=ours.ca, cert=cert, key=key).context())
    for user in ("root", "app"):
        http.post("/v3/auth/user/add", {"name": user, "password": "secret"})
        http.post("/v3/auth/role/add", {"name": user})
        http.post("/v3/auth/user/grant", {"user": user, "role": user})
    all_of = {"key": "djEv", "range_end": "djEw", "permType": "READWRITE"}
    http.post("/v3/auth/role/grant", {"name": "app", "perm": all_of})
    http.post("/v3/auth/enable", {})
    http.close()
