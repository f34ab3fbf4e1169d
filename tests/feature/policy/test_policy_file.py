"""The file of --router-policy-config: what it sets, what goes before it, what it refuses."""

from __future__ import annotations

import json
import os

import pytest

from kvflash.config_file import FILE_BYTES_MAX
from kvflash.frontend.args import parse_args as frontend
from kvflash.indexer.args import parse_args as indexer
from kvflash.router import parse_args as router

FLAG = "--router-policy-config"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    """The environment of the caller must not reach in."""
    for name in [*os.environ]:
        if name.startswith(("KVFLASH_", "DYN_")):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path):
    """Writes a file, as JSON unless it is bytes, and says where."""

    def write(content):
        path = tmp_path / "policy.json"
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        path.write_bytes(data)
        return str(path)

    return write


def refused(capsys, parse, *argv):
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("parse", [frontend, router])
def test_every_kind_of_setting_is_read(parse, file):
    path = file(
        {
            "router-mode": "prefix-cache:2,least-request:1",
            "router_temperature": 0.5,
            "--router-queue-threshold": None,
            "router-predicted-ttl-secs": None,
            "router-session-affinity-ttl-secs": 600,
            "busy-threshold": 0.9,
            "no-track-active-blocks": True,
            "no-kv-events": False,
            "router-track-output-blocks": False,
            "shadow-policy": ["kv", "random"],
            "index-memory": "8GiB",
            "decision-journal": 0,
            "serve-indexer": True,
            "router-snapshot-threshold": 5,
            "router-reset-states": True,
            "seed": 2**63,
        }
    )
    args = parse([FLAG, path])
    assert args.router_mode == "prefix-cache:2,least-request:1"
    assert (args.router_temperature, args.router_queue_threshold) == (0.5, None)
    assert args.router_predicted_ttl_secs is None
    assert args.router_session_affinity_ttl_secs == 600
    assert args.active_decode_blocks_threshold == 0.9
    assert (args.track_active_blocks, args.use_kv_events) == (False, True)
    assert not args.track_output_blocks
    assert list(args.shadow_policies) == ["kv", "random"]
    assert (args.index_memory, args.decision_journal) == (8 << 30, 0)
    assert args.serve_indexer and args.router_reset_states
    assert (args.router_snapshot_threshold, args.seed) == (5, 2**63)
    assert not {"config", "router_policy_config"} & vars(args).keys()


def test_an_empty_file_and_none_change_nothing(file):
    for parse in (frontend, router):
        assert parse([FLAG, file({})]) == parse([])
    args = frontend([FLAG, file({"fairness": "vtc-fair", "fairness-weight": "a=2"})])
    assert (args.fairness, args.fairness_weight) == ("vtc-fair", [("a", 2.0)])
    assert frontend([FLAG, file({"load-aware": True})]).router_kv_overlap_score_credit == 0
    assert router([FLAG, file({"block-size": 64})]).kv_cache_block_size == 64


@pytest.mark.parametrize("parse", [frontend, router])
def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    parse, file, monkeypatch
):
    path = file(
        {
            "router-mode": "random",
            "router-temperature": 0.5,
            "router-ttl": 1,
            "no-track-active-blocks": True,
            "serve-indexer": True,
            "shadow-policy": ["kv"],
        }
    )
    monkeypatch.setenv("DYN_ROUTER_POLICY_CONFIG", path)
    assert parse([]).router_mode == "random"
    assert parse(["--router-mode", "kv"]).router_mode == "kv"
    assert parse(["--router-temperature=0"]).router_temperature == 0
    assert parse(["--track-active-blocks"]).track_active_blocks
    assert list(parse(["--shadow-policy", "random"]).shadow_policies) == ["random"]
    for name, value in {
        "DYN_ROUTER_MODE": "round-robin",
        "KVFLASH_ROUTER_TTL_SECS": "9",
        "KVFLASH_ROUTER_TEMPERATURE": "0.25",
        "DYN_ROUTER_TRACK_ACTIVE_BLOCKS": "1",
        "KVFLASH_SERVE_INDEXER": "0",
        "KVFLASH_SHADOW_POLICY": "random least-loaded",
    }.items():
        monkeypatch.setenv(name, value)
    args = parse([])
    assert (args.router_mode, args.router_temperature) == ("round-robin", 0.25)
    assert (args.track_active_blocks, args.serve_indexer) == (True, False)
    assert list(args.shadow_policies) == ["random", "least-loaded"]
    assert parse(["--router-temperature", "0.75"]).router_temperature == 0.75
    # A preset of the file stands for what it makes of others.
    for name in ("DYN_ROUTER_MODE", "DYN_ROUTER_TRACK_ACTIVE_BLOCKS"):
        monkeypatch.delenv(name)
    preset = file({"load-aware": True, "durable-kv-events": True})
    args = parse(["--router-mode", "random", "--event-plane", "zmq", "--assume-kv-reuse"])
    assert (args.router_mode, args.event_plane, args.assume_kv_reuse) == ("random", "zmq", True)
    assert (args.router_kv_overlap_score_credit, args.use_kv_events) == (0.0, False)
    assert parse([FLAG, preset, "--kv-events", "--event-plane", "zmq"]).use_kv_events
    # The flag's own file goes before the variable's.
    other = file({"router-mode": "least-loaded"})
    assert parse([FLAG, other]).router_mode == "least-loaded"
    # So does a preset of the command line.
    assert parse([FLAG, other, "--load-aware"]).router_mode == "kv"


@pytest.mark.parametrize("parse", [frontend, router])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            {"router-tempreature": 1},
            "unknown key 'router-tempreature'; did you mean 'router-temperature'?",
        ),
        (
            {"port": 80},
            "key 'port' belongs in the file of --config: move it there, or give it as a flag",
        ),
        (
            {"router-policy-config": "x"},
            "key 'router-policy-config' belongs in the file of --config",
        ),
        (
            {"router-temperature": -1},
            "router-temperature: must be a number of at least 0, got '-1'",
        ),
        ({"router-temperature": True}, "must be a string, a number or null, got true"),
        ({"router-temperature": [1]}, "router-temperature: must be a string, a number or null"),
        ({"router-mode": None}, "router-mode: "),
        ({"router-mode": "fastest"}, "router-mode: "),
        (
            {"router-session-affinity-ttl-secs": 31_536_001},
            "must be a whole number in 1..=31536000, got '31536001'",
        ),
        ({"router-queue-policy": "last"}, "must be one of fcfs, lcfs, wspt, got 'last'"),
        ({"serve-indexer": "yes"}, 'serve-indexer: must be true or false, got "yes"'),
        ({"kv-events": 1}, "kv-events: must be true or false, got 1"),
        ({"shadow-policy": 5}, "shadow-policy: must be a list of strings, got 5"),
        ({"shadow-policy": ["kv", 5]}, 'shadow-policy: must be a list of strings, got ["kv", 5]'),
        (
            {"track-active-blocks": True, "no-track-active-blocks": True},
            "'track-active-blocks' and 'no-track-active-blocks' set the same thing",
        ),
        (b'{"seed": 1, "seed": 1}', "'seed' and 'seed' set the same thing; keep one of them"),
        (b'{"router-temperature": NaN}', "router-temperature: must be a number of at least 0"),
        (["router-mode"], "must be a mapping of flags to values, got a list"),
        (b"router-mode: kv", "is not JSON: Expecting value: line 1 column 1"),
        (b"\xff{}", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b" " * (FILE_BYTES_MAX + 1), "more than 1048576 bytes, the limit"),
    ],
)
def test_what_is_no_setting_is_refused_with_file_and_key(parse, file, capsys, content, told):
    path = file(content)
    error = refused(capsys, parse, FLAG, path)
    assert f"error: {FLAG} {path}: " in error
    assert told in error


def test_a_bad_value_is_refused_also_where_the_environment_goes_before_it(
    file, capsys, monkeypatch
):
    monkeypatch.setenv("KVFLASH_ROUTER_TEMPERATURE", "1")
    error = refused(capsys, frontend, FLAG, file({"router-temperature": "hot"}))
    assert "router-temperature: must be a number of at least 0, got 'hot'" in error


def test_a_file_that_is_not_there_is_named(capsys, monkeypatch, tmp_path):
    path = str(tmp_path / "none.json")
    told = f"{FLAG} {path}: can't be read: No such file or directory"
    assert told in refused(capsys, frontend, FLAG, path)
    monkeypatch.setenv("KVFLASH_ROUTER_POLICY_CONFIG", path)
    assert told in refused(capsys, router)
    assert "can't be read" in refused(capsys, frontend, FLAG, str(tmp_path))
    monkeypatch.delenv("KVFLASH_ROUTER_POLICY_CONFIG")
    assert "expected one argument" in refused(capsys, frontend, FLAG)
    # Others have no such flag.
    assert "unrecognized arguments" in refused(capsys, indexer, FLAG, path)
