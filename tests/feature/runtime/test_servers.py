"""Where NATS and etcd are and how to log in, from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvflash.errors import ConfigError
from kvflash.nats_login import login_options
from kvflash.servers import EtcdSettings, NatsSettings, TlsFiles


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
    login = {"user": "u", "password": "p"}
    assert login_options(settings) == {"servers": ["nats://a:1", "nats://b:2"], **login}
    assert (settings.stream_max_age_s, settings.replicas) == (60.0, 3)
    assert NatsSettings.from_env({**env, "KVFLASH_NATS_STREAM_MAX_AGE": "5"}).stream_max_age_s == 5
    assert "'p'" not in repr(settings), "secrets stay out of logs"
    del env["NATS_AUTH_USERNAME"], env["NATS_AUTH_PASSWORD"]
    assert login_options(NatsSettings.from_env(env))["token"] == "t"
    unused = {**env, "NATS_AUTH_CREDENTIALS_FILE": "/none"}
    assert "user_credentials" not in login_options(NatsSettings.from_env(unused))


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
        ({"NATS_JETSTREAM_REPLICAS": "1.5"}, "NATS_JETSTREAM_REPLICAS must be a whole number"),
        ({"KVFLASH_NATS_STREAM_MAX_BYTES": "0.5"}, "STREAM_MAX_BYTES must be a whole number"),
    ],
)
def test_what_cannot_work_is_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        NatsSettings.from_env(env)


@pytest.mark.parametrize(
    "address",
    [
        "foo:bar",
        "nats://127.0.0.1:99999",
        "nats://127.0.0.1:0",
        "nats://",
        "nats://[::1",
        "http://a",
        "nats://a nats://b",
    ],
)
def test_addresses_of_nats_are_checked(address: str) -> None:
    with pytest.raises(ConfigError) as raised:
        NatsSettings.from_env({"NATS_SERVER": f"nats://a:1,{address}"})
    assert str(raised.value) == (
        "NATS_SERVER must be nats://HOST[:PORT] or tls://HOST[:PORT], several separated by "
        f"commas, got {address!r}"
    )


def test_addresses_of_nats_in_every_form() -> None:
    given = ("a", "a:1", "[::1]:1", "nats://[::1]", "tls://a.b", "nats://u:p@w@a:1", "u:p@a:1")
    assert NatsSettings.from_env({"NATS_SERVER": ",".join(given)}).servers == given
    with pytest.raises(ConfigError) as raised:
        NatsSettings.from_env({"NATS_SERVER": "u:secret@a:x"})
    assert "secret" not in str(raised.value) and "***@a:x" in str(raised.value)


def test_a_password_with_a_comma_is_not_shown() -> None:
    said = "a login with a comma, which is not shown: set NATS_AUTH_USERNAME and NATS_AUTH_PASSWORD"
    with pytest.raises(ConfigError, match=said) as raised:
        NatsSettings.from_env({"NATS_SERVER": "a:1,nats://u:sec,ret@b:1"})
    assert "u:sec" not in str(raised.value)


def test_etcd_needs_both_halves_of_a_login() -> None:
    with pytest.raises(ConfigError, match="ETCD_AUTH_PASSWORD"):
        EtcdSettings.from_env({"ETCD_AUTH_USERNAME": "u"})


def test_addresses_of_etcd_are_https_where_there_are_certificates(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    settings = EtcdSettings.from_env({"ETCD_AUTH_CA": str(ca), "ETCD_ENDPOINTS": "a:1,https://b/"})
    assert settings.urls() == ["https://a:1", "https://b"]
    assert EtcdSettings().urls(" c:2 ,, http://d") == ["http://c:2", "http://d"]
    with pytest.raises(ConfigError, match="ETCD_ENDPOINTS names http://c:2, but ETCD_AUTH_CA"):
        settings.urls("http://c:2")
    with pytest.raises(ConfigError, match="ETCD_ENDPOINTS must name an address"):
        settings.urls(" , ")


@pytest.mark.parametrize(
    "address", ["127.0.0.1:abc", "http://127.0.0.1:99999", "ftp://a", "http://[::1", "http://"]
)
def test_addresses_of_etcd_are_checked(address: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EtcdSettings.from_env({"ETCD_ENDPOINTS": f"a:1,{address}"}).urls()
    assert str(raised.value) == (
        "ETCD_ENDPOINTS must be http://HOST[:PORT] or https://HOST[:PORT], several separated by "
        f"commas, got {address!r}"
    )


def test_what_must_be_encrypted() -> None:
    assert not NatsSettings().must_encrypt
    assert NatsSettings(servers=("nats://a", "tls://b")).must_encrypt
    assert NatsSettings(tls=TlsFiles(ca="x")).must_encrypt


def test_a_login_in_an_address_is_not_told() -> None:
    settings = NatsSettings(servers=("nats://user:se/cr@et@a:1", "nats://b:2", "user:secret@c:3"))
    assert settings.where == "nats://***@a:1, nats://b:2, ***@c:3"
    assert "secret" not in repr(settings)
    with pytest.raises(ConfigError, match="ETCD_AUTH_PASSWORD") as raised:
        EtcdSettings().urls("http://user:se/cr@et@a:1")
    assert "http://***@a:1" in str(raised.value) and "cr" not in str(raised.value)


@pytest.mark.parametrize("prefix", ["NATS_TLS_", "ETCD_AUTH_"])
def test_files_that_are_no_certificates_are_named(tmp_path: Path, prefix: str) -> None:
    file = tmp_path / "x.pem"
    file.write_text("nonsense")
    with pytest.raises(ConfigError, match=f"{prefix}CA must name certificates in PEM; .*x.pem"):
        TlsFiles(ca=str(file)).context(prefix)
    with pytest.raises(ConfigError, match=f"{prefix}(CLIENT_)?CERT and .*KEY must name .*x.pem"):
        TlsFiles(cert=str(file)).context(prefix)


@pytest.mark.parametrize("name", ["NATS_AUTH_NKEY", "NATS_AUTH_CREDENTIALS_FILE"])
def test_a_login_file_that_can_not_be_read_is_named(tmp_path: Path, name: str) -> None:
    file = tmp_path / "login"
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=f"{name} names .*login, which can't be read: "):
        login_options(NatsSettings.from_env({name: str(file)}))


def test_variables_that_are_empty_count_as_unset() -> None:
    names = ("USERNAME", "PASSWORD", "TOKEN", "NKEY", "CREDENTIALS_FILE")
    nats = {f"NATS_AUTH_{name}": "" for name in names} | {"NATS_TLS_KEY": "", "NATS_SERVER": ""}
    assert NatsSettings.from_env(nats) == NatsSettings()
    names = ("USERNAME", "PASSWORD", "CA", "CLIENT_CERT", "CLIENT_KEY")
    assert EtcdSettings.from_env({f"ETCD_AUTH_{name}": "" for name in names}) == EtcdSettings()
