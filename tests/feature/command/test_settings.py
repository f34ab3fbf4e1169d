"""The table of settings: what is made of it agrees with it, and every variable is known."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

import pytest
import settings_tables

from kvflash import KvRouterConfig, flags, settings
from kvflash.cluster_flags import ClusterFlags
from kvflash.doctor.app import parse_args as doctor
from kvflash.errors import ConfigError
from kvflash.frontend.args import parse_args as frontend
from kvflash.indexer.args import parse_args as indexer
from kvflash.router import RouterService
from kvflash.router import parse_args as router

ROOT = Path(__file__).parents[3]
# Of docstrings.
EXAMPLES = {"DYN_VARIABLE", "DYN_WORD", "KVFLASH_SOME_FLAG", "KVFLASH_NO_THING"}


def sources(folder: str, suffix: str) -> list[str]:
    return [path.read_text() for path in sorted((ROOT / folder).rglob(f"*{suffix}"))]


def test_every_variable_of_a_flag_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    variable_of = flags.variable_of

    def variable(name: str) -> str:
        seen.add(variable_of(name))
        return variable_of(name)

    monkeypatch.setattr(flags, "variable_of", variable)
    for parse in (frontend, indexer, router):
        parse([])
    doctor(["http://a"])
    assert len(seen) > 100
    assert seen <= settings.known_variables()


def test_every_variable_that_sources_name_is_known() -> None:
    crates = ("rust/src", "rust/core/src", "rust/serve/src", "rust/publish/src", "capi/src")
    texts = sources("python/kvflash", ".py")
    for crate in crates:
        found = sources(crate, ".rs")
        assert found, crate
        texts += found
    pattern = r"\b(?:KVFLASH|DYN)_[A-Z0-9_]*[A-Z0-9]\b"
    named = {name for text in texts for name in re.findall(pattern, text)} - EXAMPLES
    assert len(named) > 60
    assert named <= settings.known_variables()
    assert {"DYN_ROUTER_HOST_CACHE_HIT_WEIGHT", "KVFLASH_SESSION_MAX_SESSIONS"} <= (
        settings.known_variables()
    )


def test_a_misspelt_variable_is_told_with_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {
        "KVFLASH_ROUTR_MODE": "random",
        "KVFLASH_WHATEVER": "1",
        # KVFLASH_FILE is nearer, the flag of one command that no manual names as a variable.
        "KVFLASH_PROFILE": "document",
        "KVFLASH_ROUTER_MODE": "random",
        "OTHER": "1",
        "DYN_ROUTER_TEMPRATURE": "1",
        "DYN_ROUTER_MODE": "kv",
        "AIBRIX_PREFIX_CACHE_BLOK_SIZE": "64",
        "AIBRIX_ROUTING_ALGORITM": "random",
        "AIBRIX_ROUTING_ALGORITHM": "random",
        # AIBrix's own.
        "AIBRIX_PREFIX_CACHE_LOAD_IMBALANCE_FACTOR": "1",
        "AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS": "50",
        # Dynamo's own.
        "DYN_SYSTEM_PORT": "9090",
        "DYN_LOG": "info",
        # As Kubernetes sets them for Services.
        "KVFLASH_FRONTEND_SERVICE_HOST": "10.0.0.1",
        "KVFLASH_FRONTEND_SERVICE_PORT_HTTP": "8000",
        "KVFLASH_FRONTEND_PORT": "tcp://10.0.0.1:8000",
        "KVFLASH_FRONTEND_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    monkeypatch.setattr("os.environ", environment)
    with caplog.at_level(logging.WARNING):
        settings.warn_of_misspelt()
    assert [record.message for record in caplog.records] == [
        "environment variable AIBRIX_PREFIX_CACHE_BLOK_SIZE is not read by kvflash; did you mean "
        "AIBRIX_PREFIX_CACHE_BLOCK_SIZE?",
        "environment variable AIBRIX_ROUTING_ALGORITM is not read by kvflash; did you mean "
        "AIBRIX_ROUTING_ALGORITHM?",
        "environment variable DYN_ROUTER_TEMPRATURE is not read by kvflash; did you mean "
        "DYN_ROUTER_TEMPERATURE?",
        "environment variable KVFLASH_PROFILE is not read by kvflash; did you mean "
        "KVFLASH_POLICY_PROFILE?",
        "environment variable KVFLASH_ROUTR_MODE is not read by kvflash; did you mean "
        "KVFLASH_ROUTER_MODE?",
        "environment variable KVFLASH_WHATEVER is not read by kvflash",
    ]


@pytest.mark.parametrize("service", ["frontend", "router", "indexer"])
def test_the_table_is_sound(service: str) -> None:
    rows = settings.table(service)
    assert len(rows) > 15
    names = [name for one in rows for name in {one.dest, *one.flags}]
    assert len(names) == len(set(names))
    for one in rows:
        # A default that is not legal would be refused where it is given.
        one.check(one.key, one.default)
        assert one.help[0] and not one.help[0].endswith("."), one.key
        assert len(one.help) == 1 or one.help[1] == "", one.key


def test_classes_with_fields_of_their_own_have_the_table_s_defaults() -> None:
    by_name = {name: one for one in settings.table("router") for name in one.names}
    classes = (KvRouterConfig, ClusterFlags)
    fields = [field for cls in classes for field in dataclasses.fields(cls)]
    assert len(fields) > 40
    for field in fields:
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        # Without it the environment counts.
        if field.name != "min_initial_workers":
            assert default == by_name[field.name].default, field.name


def test_a_caller_s_numbers_may_go_beyond_those_of_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert KvRouterConfig(active_request_expiry_secs=0.5, router_ttl_secs=1e9)
    with pytest.raises(ConfigError, match="router_ttl_secs must be a number of at least 0, got -1"):
        KvRouterConfig(router_ttl_secs=-1)
    # More than 64 bits, and more than a float takes.
    assert KvRouterConfig(router_temperature=2**64).make_core(16)
    assert RouterService(router_temperature=2**64)
    with pytest.raises(ConfigError, match="temperature must be finite"):
        KvRouterConfig(router_temperature=10**400).make_core(16)
    for argv in (["--active-request-expiry", "0.5"], ["--router-ttl", "1e9"]):
        with pytest.raises(SystemExit):
            frontend(argv)
        assert f"{argv[0]}" in capsys.readouterr().err


def test_the_tables_of_the_manuals_are_those_of_make_settings() -> None:
    shown: set[str] = set()
    for path in sorted(settings_tables.DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        fresh, rows = settings_tables.written(text)
        assert fresh == text, f"{path.name}: make settings"
        shown |= {flag for one in rows for flag in one.flags}
    for service in ("frontend", "router", "indexer"):
        missing = {flag for one in settings.table(service) for flag in one.flags} - shown
        # Told beside the table: other names of the frontend's flag.
        assert missing <= {"--router-block-size", "--block-size"}, service


def test_the_manual_lists_the_fair_queues_that_the_flag_takes() -> None:
    (setting,) = (one for one in settings.table("frontend") if one.key == "fairness")
    section = (ROOT / "docs/policies.md").read_text().split("\n## The fair queue\n")[1]
    table = section.split("| name | rule |\n|---|---|\n")[1].split("\n\n")[0]
    names = [line.split("|")[1] for line in table.splitlines()]
    listed = [name for cell in names for name in re.findall("`([^`]+)`", cell)]
    assert setting.choices == ["none", *listed]
