"""Variables that nobody reads are told; those that somebody reads are all known."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from kvflash import flags, variables
from kvflash.doctor.args import parse_args as doctor
from kvflash.frontend.args import parse_args as frontend
from kvflash.indexer.args import parse_args as indexer
from kvflash.router import parse_args as router

ROOT = Path(__file__).parents[3]
# Of docstrings.
EXAMPLES = {"KVFLASH_SOME_FLAG", "KVFLASH_NO_THING"}


def sources(folder: str, suffix: str) -> list[str]:
    return [path.read_text() for path in sorted((ROOT / folder).rglob(f"*{suffix}"))]


def test_every_variable_of_a_flag_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    def variable(name: str) -> str:
        seen.add(flags.variable_of(name))
        return flags.variable_of(name)

    monkeypatch.setattr(flags.Flags, "_variable", staticmethod(variable))
    for parse in (frontend, indexer, router):
        parse([])
    doctor(["http://a"])
    assert len(seen) > 100
    assert seen <= variables.KNOWN


def test_every_variable_that_sources_name_is_known() -> None:
    crates = ("rust/src", "rust/core/src", "rust/serve/src", "rust/publish/src", "capi/src")
    python = sources("python/kvflash", ".py")
    texts = list(python)
    for crate in crates:
        found = sources(crate, ".rs")
        assert found, crate
        texts += found
    named = {name for text in texts for name in re.findall(r"KVFLASH_[A-Z0-9_]*[A-Z0-9]\b", text)}
    assert len(named) > 15
    assert named - EXAMPLES <= variables.KNOWN
    dynamo = {name for text in python for name in re.findall(r'"(DYN_[A-Z0-9_]+)"', text)}
    assert len(dynamo) > 40
    assert dynamo <= variables.KNOWN_OF_DYNAMO
    assert "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT" in variables.KNOWN_OF_DYNAMO
    table = (ROOT / "rust/core/src/policy/settings/table.rs").read_text()
    policies = re.findall(r'^\s+(?:variable\()?"([A-Z][A-Z0-9_]+)",', table, re.MULTILINE)
    assert len(policies) > 15
    assert {f"KVFLASH_{name}" for name in policies} <= variables.KNOWN


def test_a_misspelt_variable_is_told_with_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {
        "KVFLASH_ROUTR_MODE": "random",
        "KVFLASH_WHATEVER": "1",
        "KVFLASH_ROUTER_MODE": "random",
        "OTHER": "1",
        "DYN_ROUTER_TEMPRATURE": "1",
        "DYN_ROUTER_MODE": "kv",
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
        variables.warn_of_misspelt()
    assert [record.message for record in caplog.records] == [
        "environment variable DYN_ROUTER_TEMPRATURE is not read by kvflash; did you mean "
        "DYN_ROUTER_TEMPERATURE?",
        "environment variable KVFLASH_ROUTR_MODE is not read by kvflash; did you mean "
        "KVFLASH_ROUTER_MODE?",
        "environment variable KVFLASH_WHATEVER is not read by kvflash",
    ]
