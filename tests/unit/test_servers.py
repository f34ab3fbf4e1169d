"""Where NATS and etcd are and how to log in, from the environment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nkeys
import pytest

from kvflash.errors import ConfigError, TransportError
from kvflash.servers import EtcdSettings, NatsSettings
from kvflash.transport.nats_connection import connect
from servers import NatsServer


def test_nothing_in_the_environment_is_the_local_server() -> None:
    assert NatsSettings.from_env({}) == NatsSettings()
    assert EtcdSettings.from_env({}) == EtcdSettings()


def test_the_first_way_to_log_in_counts() -> None:
    env = {
        "NATS_SERVER": "nats://a:1, nats://b:2",
        "NATS_AUTH_USERNAME": "u",
        "NATS_AUTH_PASSWORD": "p",
        "NATS_AUTH_TOKEN": "t",
        "NATS_AUTH_NKEY": "n",
        "DYN_NATS_STREAM_MAX_AGE": "60",
        "NATS_JETSTREAM_REPLICAS": "3",
    }
    settings = NatsSettings.from_env(env)
    assert settings.servers == ("nats://a:1", "nats://b:2")
    assert (settings.user, settings.token, settings.nkey) == ("u", None, None)
    assert (settings.stream_max_age_s, settings.replicas) == (60.0, 3)
    assert NatsSettings.from_env({**env, "KVFLASH_NATS_STREAM_MAX_AGE": "5"}).stream_max_age_s == 5
    assert "'p'" not in repr(settings), "secrets stay out of logs"
    del env["NATS_AUTH_USERNAME"], env["NATS_AUTH_PASSWORD"]
    assert NatsSettings.from_env(env).token == "t"


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"NATS_AUTH_USERNAME": "u"}, "NATS_AUTH_PASSWORD"),
        ({"NATS_AUTH_CREDENTIALS_FILE": "/none"}, "NATS_AUTH_CREDENTIALS_FILE"),
        ({"NATS_SERVER": " , "}, "NATS_SERVER"),
        ({"NATS_TLS_CA": "/none"}, "NATS_TLS_CA"),
        ({"KVFLASH_NATS_STREAM_MAX_AGE": "0"}, "KVFLASH_NATS_STREAM_MAX_AGE"),
        ({"NATS_JETSTREAM_REPLICAS": "nan"}, "NATS_JETSTREAM_REPLICAS"),
        ({"DYN_NATS_STREAM_MAX_AGE": "x"}, "DYN_NATS_STREAM_MAX_AGE"),
    ],
)
def test_what_cannot_work_is_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        NatsSettings.from_env(env)


def test_etcd_needs_both_halves_of_a_login() -> None:
    with pytest.raises(ConfigError, match="ETCD_AUTH_PASSWORD"):
        EtcdSettings.from_env({"ETCD_AUTH_USERNAME": "u"})


def try_to_connect(env: dict[str, str]) -> None:
    async def work() -> None:
        client = await connect(NatsSettings.from_env(env), name="test")
        await client.close()

    asyncio.run(work())


def test_a_missing_server_is_one_line_that_says_what_to_start() -> None:
    with pytest.raises(TransportError, match=r"start one .nats-server -js.*--event-plane zmq"):
        try_to_connect({"NATS_SERVER": "nats://127.0.0.1:1"})


def test_login_with_user_token_and_key(tmp_path: Path) -> None:
    pair = nkeys.from_seed(
        nkeys.encode_seed(b"0123456789abcdef0123456789abcdef", nkeys.PREFIX_BYTE_USER)
    )
    config = tmp_path / "nats.conf"
    users = f'[{{user: "u", password: "p"}}, {{nkey: "{pair.public_key.decode()}"}}]'
    config.write_text(f"authorization {{ users = {users} }}")
    seed_file = tmp_path / "seed"
    seed_file.write_bytes(pair.seed)
    server = NatsServer(tmp_path, ["-c", str(config)])
    try:
        where = {"NATS_SERVER": server.url}
        try_to_connect({**where, "NATS_AUTH_USERNAME": "u", "NATS_AUTH_PASSWORD": "p"})
        try_to_connect({**where, "NATS_AUTH_NKEY": pair.seed.decode()})
        try_to_connect({**where, "NATS_AUTH_NKEY": str(seed_file)})
        with pytest.raises(ConfigError, match=r"refuses the login.*NATS_AUTH_TOKEN"):
            try_to_connect(where)
    finally:
        server.close()
    config.write_text('authorization { token: "secret" }')
    server = NatsServer(tmp_path, ["-c", str(config)])
    try:
        try_to_connect({"NATS_SERVER": server.url, "NATS_AUTH_TOKEN": "secret"})
    finally:
        server.close()
