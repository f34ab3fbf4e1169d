"""Flags and their environment variables: the indexer's, and the parsers behind all of them."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import pickle

import pytest

from kvflash import KvRouterConfig, _core
from kvflash.cluster_flags import ClusterFlags
from kvflash.config import bounded_float, bounded_int, bounded_size, optional
from kvflash.errors import ConfigError, ConflictError
from kvflash.flags import Flags
from kvflash.frontend import args as frontend
from kvflash.frontend.app import main as run_frontend
from kvflash.frontend.app import make_frontend
from kvflash.indexer import args as indexer
from kvflash.indexer.__main__ import main
from kvflash.indexer.args import IndexerArgs, WorkerEntry, parse_args, parse_workers
from kvflash.router import args as router


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    """The environment of the caller must not reach in."""
    for name in [*os.environ]:
        if name.startswith(("KVFLASH_", "DYN_", "NATS_")):
            monkeypatch.delenv(name)


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_defaults_are_the_published_ones():
    args = parse_args([])
    assert (args.host, args.port, args.threads) == ("0.0.0.0", 8090, 4)
    assert (args.model_name, args.tenant_id, args.block_size) == ("default", "default", None)
    assert (args.workers, args.max_blocks, args.max_body_bytes) == ((), 1 << 25, 8 << 20)


@pytest.mark.parametrize("parse", [parse_args, frontend.parse_args])
def test_index_memory_is_a_size_or_nothing(parse, monkeypatch, capsys):
    assert parse([]).index_memory == 0
    for text, size in (
        ("8GiB", 8 << 30),
        ("512MiB", 512 << 20),
        ("8000000000", 8 * 10**9),
        ("0", 0),
    ):
        assert parse(["--index-memory", text]).index_memory == size
        monkeypatch.setenv("KVFLASH_INDEX_MEMORY", text)
        assert parse([]).index_memory == size
    monkeypatch.delenv("KVFLASH_INDEX_MEMORY")
    for text in ("8", "-1", "much", "", "8TiBs", "1000KiB", "1e30"):
        with pytest.raises(SystemExit):
            parse([f"--index-memory={text}"])
        error = capsys.readouterr().err
        assert "--index-memory: must be 0 for no limit or a size of at least 1MiB" in error
        assert repr(text) in error
    monkeypatch.setenv("KVFLASH_INDEX_MEMORY", "8")
    with pytest.raises(SystemExit):
        parse([])
    assert "KVFLASH_INDEX_MEMORY: must be 0 for no limit" in capsys.readouterr().err


def test_workers_are_read_as_published():
    text = "1=tcp://host:5557,2:1=tcp://host:5558"
    assert parse_workers(text) == (
        WorkerEntry(instance_id=1, dp_rank=0, endpoint="tcp://host:5557"),
        WorkerEntry(instance_id=2, dp_rank=1, endpoint="tcp://host:5558"),
    )
    assert parse_workers(" 1=ipc:///tmp/a , ,") == (
        WorkerEntry(instance_id=1, dp_rank=0, endpoint="ipc:///tmp/a"),
    )
    assert parse_workers("") == ()
    # The address may hold the separators of the identity.
    assert parse_workers("1:2=tcp://[::1]:5557")[0].endpoint == "tcp://[::1]:5557"


@pytest.mark.parametrize(
    "entry",
    [
        *("1", "=tcp://h:1", "1=", "a=tcp://h:1", "1:a=tcp://h:1", "-1=x", "1:=a:b"),
        # Python converts no number that long.
        "9" * 5_000 + "=tcp://h:1",
    ],
    ids=lambda entry: entry[:20],
)
def test_a_wrong_worker_entry_is_named(entry):
    if entry == "1:=a:b":
        # An empty rank is rank 0, as an absent one.
        assert parse_workers(entry)[0].dp_rank == 0
        return
    with pytest.raises(ConfigError, match="invalid worker entry") as caught:
        parse_workers(f"7=tcp://h:1,{entry}")
    assert repr(entry) in str(caught.value)


def test_a_superscript_is_no_instance_id():
    with pytest.raises(ConfigError):
        parse_workers("²=tcp://h:1")


def test_block_size_is_required_with_workers():
    with pytest.raises(ConfigError, match="--block-size is required with --workers"):
        parse_args(["--workers", "1=tcp://h:1"])
    args = parse_args(["--workers", "1=tcp://h:1", "--block-size", "16"])
    assert (len(args.workers), args.block_size) == (1, 16)


def test_main_refuses_with_status_2(capsys):
    assert main(["--workers", "1"]) == 2
    assert "invalid worker entry '1'" in capsys.readouterr().err
    workers = "1=tcp://127.0.0.1:1,1=tcp://127.0.0.1:2"
    assert main(["--workers", workers, "--block-size", "4"]) == 2
    told = "--workers: entry '1:0=tcp://127.0.0.1:2': instance_id 1 dp_rank 0 is already registered"
    assert told in capsys.readouterr().err
    for endpoint in ("udp://127.0.0.1:1", "tcp://host", "host:1", "tcp://h:99999"):
        assert main(["--workers", f"7:1={endpoint}", "--block-size", "4"]) == 2
        error = capsys.readouterr().err
        assert f"--workers: entry '7:1={endpoint}': endpoint must be tcp://host:port" in error
    assert main(["--workers", "1=tcp://h:1", "--block-size", "4", "--model-name", ""]) == 2
    assert "--model-name must not be empty" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [f"{2**64}=tcp://127.0.0.1:1", f"1:{2**32}=tcp://127.0.0.1:1"])
def test_workers_that_cannot_be_registered_are_refused_by_name(workers):
    with pytest.raises(ConfigError):
        parse_workers(workers)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--port", "65536"], "0..=65535"),
        (["--port", "-1"], "0..=65535"),
        (["--port", "http"], "'http'"),
        (["--threads", "0"], "1..=1024"),
        (["--block-size", "0"], "1..=4294967295"),
        (["--max-body-bytes", "0"], "512MiB"),
        (["--max-blocks", "-1"], "0..=281474976710656"),
        (["--min-initial-workers", "65536"], "0..=65535"),
        (["--min-initial-workers", "-1"], "0..=65535"),
        (["--min-initial-workers", "two"], "'two'"),
        (["--log-level", "loud"], "loud"),
        (["--log-format", "xml"], "xml"),
        (["--nonsense"], "--nonsense"),
        (["--por", "1"], "--por"),
    ],
)
def test_a_wrong_flag_is_named_with_what_is_legal(argv, named, capsys):
    message = refused(capsys, *argv)
    assert argv[0] in message
    assert named in message


def test_the_environment_sets_and_the_command_line_wins(monkeypatch):
    monkeypatch.setenv("KVFLASH_PORT", "1234")
    monkeypatch.setenv("KVFLASH_MAX_BODY_BYTES", "1MiB")
    monkeypatch.setenv("KVFLASH_LOG_LEVEL", "debug")
    args = parse_args(["--port", "99"])
    assert (args.port, args.max_body_bytes, args.log_level) == (99, 1 << 20, "debug")


@pytest.mark.parametrize(
    ("name", "value"),
    [("KVFLASH_PORT", "many"), ("KVFLASH_LOG_LEVEL", "loud"), ("KVFLASH_THREADS", "0")],
)
def test_a_wrong_variable_is_named(name, value, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    message = refused(capsys)
    assert name in message
    assert value in message


WAIT_VARIABLES = (
    "KVFLASH_MIN_INITIAL_WORKERS",
    "KVFLASH_ROUTER_MIN_INITIAL_WORKERS",
    "DYN_ROUTER_MIN_INITIAL_WORKERS",
)


@pytest.mark.parametrize("name", WAIT_VARIABLES)
def test_workers_to_wait_for_by_each_name(name, monkeypatch, capsys):
    assert parse_args([]).min_initial_workers == 0
    monkeypatch.setenv(name, "3")
    assert parse_args([]).min_initial_workers == 3
    assert parse_args(["--min-initial-workers", "65535"]).min_initial_workers == 65535
    monkeypatch.setenv(name, "many")
    assert f"{name}: must be a whole number in 0..=65535, got 'many'" in refused(capsys)


def test_names_of_one_setting_must_agree(monkeypatch, capsys):
    for name in WAIT_VARIABLES[1:]:
        monkeypatch.setenv(name, "2")
    assert parse_args([]).min_initial_workers == 2
    monkeypatch.setenv(WAIT_VARIABLES[1], "4")
    message = refused(capsys)
    assert all(name in message for name in WAIT_VARIABLES[1:])


@pytest.mark.parametrize(
    ("names", "field", "value"),
    [
        ("PORT HTTP_PORT", "port", 8123),
        (
            "ACTIVE_DECODE_BLOCKS_THRESHOLD BUSY_THRESHOLD",
            "active_decode_blocks_threshold",
            0.5,
        ),
        (
            "KV_OVERLAP_SCORE_WEIGHT ROUTER_KV_OVERLAP_SCORE_WEIGHT",
            "kv_overlap_score_weight",
            2.0,
        ),
        ("ROUTER_TTL ROUTER_TTL_SECS", "router_ttl", 7.0),
        (
            "ROUTER_ACTIVE_REQUEST_WEIGHT ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
            "router_active_request_weight",
            3.0,
        ),
    ],
)
def test_every_name_of_a_flag_has_its_variable(names, field, value, monkeypatch, capsys):
    first, other = (f"KVFLASH_{name}" for name in names.split())
    monkeypatch.setenv(other, str(value))
    for parse in (frontend.parse_args, router.parse_args):
        assert getattr(parse([]), field) == value
    monkeypatch.setenv(first, "0.25")
    for parse in (frontend.parse_args, router.parse_args):
        with pytest.raises(SystemExit):
            parse([])
        assert f"{first}=0.25 and {other}={value}" in capsys.readouterr().err


def test_what_kubernetes_says_of_services_is_no_port(monkeypatch):
    monkeypatch.setenv("KVFLASH_PORT", "tcp://10.0.0.1:80")
    monkeypatch.setenv("KVFLASH_HTTP_PORT", "tcp://10.0.0.2:80")
    assert frontend.parse_args([]).port == 8000
    monkeypatch.setenv("DYN_HTTP_PORT", "8124")
    assert frontend.parse_args([]).port == 8124


@pytest.mark.parametrize(
    ("setting", "value", "wanted"),
    [
        ("port", 65536, "--port must be a whole number in 0..=65535, got 65536"),
        ("threads", 0, "--threads must be"),
        ("block_size", 0, "--block-size must be"),
        ("max_body_bytes", 0, "--max-body-bytes must be"),
        ("max_blocks", -1, "--max-blocks must be"),
        ("index_memory", -1, "--index-memory must be"),
        ("min_initial_workers", 65536, "--min-initial-workers must be"),
        ("model_name", "", "--model-name must not be empty"),
    ],
)
def test_settings_of_a_caller_have_the_same_limits(setting, value, wanted):
    with pytest.raises(ConfigError, match=wanted):
        IndexerArgs(**{setting: value})


def test_help_names_the_environment(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "KVFLASH_<FLAG>" in out
    assert "--max-blocks" in out


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("8m", 8_000_000),
        ("8M", 8_000_000),
        ("8MB", 8_000_000),
        ("2 GiB", 2 << 30),
        ("1.5k", 1500),
        ("64ki", 65536),
    ],
)
def test_sizes(text, size):
    assert bounded_size(1, has_zero=False)(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "MiB", "1TiB", "1e", "nan", "inf", "one", "0.4", "9999999999GiB"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a size"):
        bounded_size(1, has_zero=False)(text)


@pytest.mark.parametrize(
    ("least", "has_zero", "text", "message"),
    [
        (1, True, "x", "must be 0 or a size such as"),
        (1, False, "9999999999GiB", r"8000000, below 2\^63 bytes, got"),
        (2**20, True, "8", "must be 0 for no limit or a size of at least 1MiB"),
    ],
)
def test_a_refused_size_says_what_is_legal(least, has_zero, text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        bounded_size(least, has_zero=has_zero)(text)


def test_bounded_numbers():
    assert bounded_int(1, 5)("5") == 5
    assert bounded_float(0.0)("1e3") == 1000.0
    assert bounded_float(0.0, 1.0)("1") == 1.0
    for parse, text in (
        (bounded_int(1, 5), "6"),
        (bounded_int(1, 5), "1.0"),
        (bounded_int(1, 5), ""),
        (bounded_float(0.0), "-0.1"),
        (bounded_float(0.0), "inf"),
        (bounded_float(0.0), "nan"),
        (bounded_float(0.0, 1.0), "1.01"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match="got"):
            parse(text)


def test_switches_and_lists_read_the_environment(monkeypatch):
    monkeypatch.setenv("KVFLASH_NO_CACHE", "yes")
    monkeypatch.setenv("KVFLASH_ENGINE", "a b")
    flags = Flags("prog", "A test.")
    flags.add_toggle("uses_cache", off=["--no-cache"], default=True, summary="do without")
    flags.add_toggle("loud", on=["--loud"], summary="more")
    flags.add_list("--engine", dest="engines", summary="one", metavar="URL")
    args = flags.parse(["--engine", "c"])
    assert args.uses_cache is False
    assert args.loud is False
    assert args.engines[-1] == "c"


def toggled(*argv):
    flags = Flags("test", "")
    flags.add_toggle(
        "is_on", on=["--thing"], off=["--no-thing", "--without-thing"], default=True,
        summary="a thing", variables=["DYN_THING"],
    )  # fmt: skip
    return flags.parse(argv).is_on


def test_toggles_take_all_their_names_and_the_last_one_wins(monkeypatch, capsys):
    assert toggled() is True
    assert toggled("--without-thing") is False
    assert toggled("--no-thing", "--thing") is True
    for variable, text, wanted in (
        ("KVFLASH_THING", "off", False),
        ("KVFLASH_NO_THING", "1", False),
        ("KVFLASH_NO_THING", "0", True),
        ("KVFLASH_WITHOUT_THING", "TRUE", False),
        ("DYN_THING", "false", False),
    ):
        monkeypatch.setenv(variable, text)
        assert toggled() is wanted, variable
        assert toggled("--thing") is True
        monkeypatch.delenv(variable)
    monkeypatch.setenv("KVFLASH_THING", "1")
    monkeypatch.setenv("DYN_THING", "0")
    with pytest.raises(SystemExit):
        toggled()
    assert "KVFLASH_THING=1 and DYN_THING=0" in capsys.readouterr().err
    monkeypatch.setenv("DYN_THING", "maybe")
    with pytest.raises(SystemExit):
        toggled()
    assert "DYN_THING: must be one of 1, true" in capsys.readouterr().err


def test_what_is_not_set_can_be_said():
    parse = optional(bounded_float(0, 1))
    assert [parse(text) for text in ("None", "none", "0.5")] == [None, None, 0.5]
    with pytest.raises(argparse.ArgumentTypeError):
        parse("nothing")


@pytest.mark.parametrize(
    ("argv", "field", "wanted"),
    [
        (["--router-kv-overlap-score-weight", "2"], "kv_overlap_score_weight", 2.0),
        (["--router-kv-overlap-score-credit", "1.5"], "router_kv_overlap_score_credit", 1.5),
        (["--router-prefill-load-scale", "2"], "router_prefill_load_scale", 2.0),
        (["--no-router-kv-events"], "use_kv_events", False),
        (["--no-kv-events", "--router-kv-events"], "use_kv_events", True),
        (["--router-ttl-secs", "7"], "router_ttl", 7.0),
        (["--no-router-track-active-blocks"], "track_active_blocks", False),
        (["--no-router-track-prefill-tokens"], "track_prefill_tokens", False),
        (["--no-router-assume-kv-reuse"], "assume_kv_reuse", False),
        (["--busy-threshold", "0.5"], "active_decode_blocks_threshold", 0.5),
        (["--active-decode-blocks-threshold", "None"], "active_decode_blocks_threshold", None),
        (["--active-prefill-tokens-threshold", "none"], "active_prefill_tokens_threshold", None),
        (["--http-port", "8001"], "port", 8001),
        (["--min-initial-workers", "3"], "min_initial_workers", 3),
        (["--router-queue-threshold", "16"], "router_queue_threshold", 16.0),
        (["--router-queue-threshold", "None"], "router_queue_threshold", None),
        (["--router-queue-policy", "wspt"], "router_queue_policy", "wspt"),
        (["--router-track-output-blocks"], "track_output_blocks", True),
        (["--no-router-track-output-blocks"], "track_output_blocks", False),
        (["--router-host-cache-hit-weight", "0.5"], "router_host_cache_hit_weight", 0.5),
        (["--router-disk-cache-hit-weight", "0"], "router_disk_cache_hit_weight", 0.0),
        (["--metrics-prefix", "dynamo_frontend"], "metrics_prefix", "dynamo_frontend"),
        (["--request-plane", "nats"], "request_plane", "nats"),
    ],
)
def test_the_frontend_takes_every_spelling(argv, field, wanted):
    assert getattr(frontend.parse_args(argv), field) == wanted


def test_a_time_that_is_given_is_meant_be_it_the_default(monkeypatch):
    assert not frontend.parse_args([]).is_router_ttl_meant
    assert frontend.parse_args(["--router-ttl", "120"]).is_router_ttl_meant
    monkeypatch.setenv("DYN_ROUTER_TTL_SECS", "120")
    args = frontend.parse_args([])
    assert args.is_router_ttl_meant
    assert args.router_ttl == 120.0
    assert args.core_settings()["is_router_ttl_meant"]


def test_the_frontend_reads_the_variables_of_those_who_come_from_elsewhere(monkeypatch):
    for variable, text, field, wanted in (
        ("DYN_ROUTER_MODE", "random", "router_mode", "random"),
        ("DYN_KV_OVERLAP_SCORE_WEIGHT", "0.5", "kv_overlap_score_weight", 0.5),
        ("DYN_KV_EVENTS", "false", "use_kv_events", False),
        ("DYN_ROUTER_TTL", "9", "router_ttl", 9.0),
        ("DYN_ROUTER_MIN_INITIAL_WORKERS", "2", "min_initial_workers", 2),
        ("DYN_ROUTER_QUEUE_THRESHOLD", "4", "router_queue_threshold", 4.0),
        ("DYN_ROUTER_QUEUE_POLICY", "lcfs", "router_queue_policy", "lcfs"),
        ("DYN_ROUTER_TRACK_OUTPUT_BLOCKS", "true", "track_output_blocks", True),
        ("DYN_ROUTER_HOST_CACHE_HIT_WEIGHT", "1", "router_host_cache_hit_weight", 1.0),
        ("DYN_METRICS_PREFIX", "mine", "metrics_prefix", "mine"),
        ("DYN_HTTP_HOST", "::1", "host", "::1"),
        ("DYN_HTTP_PORT", "8123", "port", 8123),
        ("DYN_ENFORCE_DISAGG", "1", "enforce_disagg", "always"),
        ("KVFLASH_ROUTER_MIN_INITIAL_WORKERS", "2", "min_initial_workers", 2),
        ("KVFLASH_NO_KV_EVENTS", "1", "use_kv_events", False),
    ):
        monkeypatch.setenv(variable, text)
        assert getattr(frontend.parse_args([]), field) == wanted, variable
        monkeypatch.delenv(variable)


def test_durable_events_are_the_event_plane_nats_and_deprecated(monkeypatch):
    assert frontend.parse_args([]).event_plane == "zmq"
    for flag in ("--router-durable-kv-events", "--durable-kv-events"):
        with pytest.warns(FutureWarning, match="--event-plane nats"):
            assert frontend.parse_args([flag]).event_plane == "nats"
    monkeypatch.setenv("DYN_ROUTER_DURABLE_KV_EVENTS", "1")
    with pytest.warns(FutureWarning):
        assert frontend.parse_args([]).event_plane == "nats"
    with pytest.raises(ConfigError, match="--no-kv-events"):
        frontend.parse_args(["--no-kv-events"])


def test_load_aware_is_a_preset():
    args = frontend.parse_args(["--load-aware", "--router-mode", "kv"])
    assert (args.router_mode, args.use_kv_events, args.assume_kv_reuse) == ("kv", False, False)
    assert args.router_kv_overlap_score_credit == 0
    assert args.track_active_blocks and args.track_prefill_tokens


def test_load_aware_is_a_preset_in_a_constructor_too():
    for made in (router.RouterArgs, frontend.FrontendArgs):
        args = made(load_aware=True)
        assert args == dataclasses.replace(made(), load_aware=True)
        assert (args.router_mode, args.use_kv_events, args.assume_kv_reuse) == ("kv", False, False)
        assert args.router_kv_overlap_score_credit == 0
        assert dataclasses.replace(args, port=1).router_mode == "kv"
        with pytest.raises(ConfigError, match="contradicts --router-mode random"):
            made(load_aware=True, router_mode="random")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("--load-aware --router-mode random", "--load-aware .* contradicts --router-mode random"),
        ("--load-aware --kv-events", "--load-aware sets --no-kv-events, which contradicts --kv-ev"),
        (
            "--load-aware --router-kv-overlap-score-credit 2",
            "sets --router-kv-overlap-score-credit 0.0, which contradicts .*-credit 2.0: leave one",
        ),
        ("--router-durable-kv-events --event-plane zmq", "contradicts --event-plane zmq"),
        ("--use-remote-indexer http://a:1 --no-kv-events", "--no-kv-events switches off"),
        ("--use-remote-indexer http://a:1 --load-aware", "--load-aware switches off"),
    ],
)
def test_flags_that_would_do_nothing_beside_others_are_refused(line, wanted):
    with pytest.raises(ConfigError, match=wanted):
        frontend.parse_args(line.split())
    assert run_frontend(line.split()) == 2


@pytest.mark.parametrize(
    "line",
    [
        "--fairness-weight a=2",
        "--fairness-identity user",
        "--fairness-queue-limit 5",
        "--fairness-queue-timeout 5",
        "--fairness-max-running 8",
        "--fairness-cached-share 0.5",
    ],
)
def test_settings_of_fairness_alone_are_no_mistake(line):
    # The core warns of them.
    args = frontend.parse_args(line.split())
    assert args.fairness == "none"
    make_frontend(args)


@pytest.mark.parametrize(
    ("second", "wanted"),
    [
        (
            "http://127.0.0.1:2,id=1",
            "worker id 1 is already registered: http://127.0.0.1:1 has it; workers without an id "
            "are numbered 1, 2, ... in order",
        ),
        ("http://127.0.0.1:1/", "http://127.0.0.1:1/ is already registered as worker 1"),
        (
            "http://127.0.0.1:2,events=tcp://127.0.0.1:3",
            "events: tcp://127.0.0.1:3 is already the event socket of worker 1; give each "
            "engine an endpoint of its own in --kv-events-config",
        ),
    ],
)
def test_what_another_worker_has_is_named_with_the_flag(second, wanted):
    args = frontend.parse_args(["--worker", "http://127.0.0.1:1,events=tcp://127.0.0.1:3", second])
    with pytest.raises(ConflictError) as caught:
        make_frontend(args)
    assert str(caught.value) == f"--worker {second!r}: {wanted}"


@pytest.mark.parametrize(
    ("argv", "variables", "wanted"),
    [
        (
            [],
            {"KVFLASH_WORKER": "http://a:1 foo"},
            "environment variable KVFLASH_WORKER 'foo': worker",
        ),
        (["--worker", "foo"], {"KVFLASH_WORKER": "http://a:1"}, "^--worker 'foo': worker url must"),
        (["--prefill-worker", "http://a:1,b=2"], {}, "^--prefill-worker 'http://a:1,b=2': unknown"),
        (["--worker", "http://me:pass@a:1"], {}, r"^--worker 'http://\*\*\*@a:1': worker url must"),
        (
            [],
            {"KVFLASH_TOKENIZER": "/nope"},
            "^environment variable KVFLASH_TOKENIZER must be a fol",
        ),
        (["--tokenizer", ""], {}, '^--tokenizer must be a folder with tokenizer.json, got ""'),
        (["--tokenizer", "/a/tokenizer.json"], {}, '^--tokenizer must be .* "/a/tokenizer.json"'),
        (["--tokenizer", "org/chat=/nope"], {}, "^--tokenizer of org/chat must be a fol"),
    ],
)
def test_what_can_not_be_made_names_where_it_came_from(argv, variables, wanted, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=wanted):
        make_frontend(frontend.parse_args(argv))


def test_a_worker_of_the_router_that_is_none_names_where_it_came_from(monkeypatch):
    with pytest.raises(ConfigError, match=r"^--worker 'http://a,b': 'b' is not key=value"):
        router.parse_args(["--worker", "http://a,b"])
    # Python converts no number that long.
    with pytest.raises(ConfigError, match=r"^--worker 'http://a,id=9+': id must be a number in"):
        router.parse_args(["--worker", f"http://a,id={'9' * 5_000}"])
    monkeypatch.setenv("KVFLASH_WORKER", "http://a http://a,b")
    with pytest.raises(
        ConfigError, match=r"^environment variable KVFLASH_WORKER 'http://a,b': 'b'"
    ):
        router.parse_args([])


def test_a_namespace_that_nobody_can_have_is_refused(capsys):
    with pytest.raises(SystemExit):
        frontend.parse_args(["--namespace", "bad name!"])
    assert "--namespace: a namespace must have 1 to 48" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--active-decode-blocks-threshold", "1.1"],
        ["--active-decode-blocks-threshold", "nan"],
        ["--active-prefill-tokens-threshold", "-1"],
        ["--active-prefill-tokens-threshold-frac", "-0.1"],
        ["--active-prefill-tokens-threshold-frac", "inf"],
        ["--router-temperature", "-1"],
        ["--router-prune-target-ratio", "2"],
    ],
)
def test_bad_routing_flags_are_refused_by_name(argv, capsys):
    with pytest.raises(SystemExit):
        frontend.parse_args(argv)
    error = capsys.readouterr().err
    assert argv[0] in error and argv[1] in error


def test_the_address_to_listen_on_goes_before_the_one_that_others_reach(monkeypatch):
    for parse in (frontend.parse_args, router.parse_args):
        monkeypatch.setenv("KVFLASH_HOST", "10.1.2.3")
        assert parse([]).host == "10.1.2.3"
        monkeypatch.setenv("KVFLASH_HTTP_HOST", "0.0.0.0")
        assert parse([]).host == "0.0.0.0"
        monkeypatch.delenv("KVFLASH_HOST")
        assert parse([]).host == "0.0.0.0"
        monkeypatch.delenv("KVFLASH_HTTP_HOST")


@pytest.mark.parametrize("module", [frontend, router, indexer])
def test_a_variable_that_is_empty_counts_as_unset(monkeypatch, module):
    wanted = module.parse_args([])
    for name in (
        *("KVFLASH_PORT", "KVFLASH_MIN_INITIAL_WORKERS", "DYN_ROUTER_MIN_INITIAL_WORKERS"),
        *("KVFLASH_ROUTER_MODE", "DYN_ROUTER_TEMPERATURE", "KVFLASH_WORKER", "KVFLASH_KV_EVENTS"),
        *("KVFLASH_USE_REMOTE_INDEXER", "DYN_STORE_KV", "DYN_METRICS_PREFIX"),
    ):
        monkeypatch.setenv(name, "")
    assert module.parse_args([]) == wanted
    # Beside one with a value it is no contradiction.
    monkeypatch.setenv("DYN_ROUTER_MIN_INITIAL_WORKERS", "2")
    assert module.parse_args([]).min_initial_workers == 2


@pytest.mark.parametrize("name", ["KVFLASH", "DYN_KV"])
def test_paths_for_tests_of_an_indexer_are_served_on_request(monkeypatch, name):
    for value, wanted in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(f"{name}_INDEXER_TEST_ENDPOINTS", value)
        assert indexer.parse_args([]).test_endpoints is wanted


def test_settings_of_nats_without_it_are_named_with_what_to_add(monkeypatch):
    flag, field = "--event-plane nats", "KVFLASH_EVENT_PLANE=nats"
    assert ClusterFlags().without_effect(flag) == []
    flags = frontend.parse_args(["--router-reset-states", "--router-snapshot-threshold", "5"])
    reset, threshold = flags.without_effect(flag)
    assert reset.startswith("--router-reset-states has no effect without --event-plane nats: ")
    assert threshold.startswith("--router-snapshot-threshold has no effect without --event-plane")
    assert reset.endswith("; add --event-plane nats") and threshold.endswith("; add " + flag)
    config = KvRouterConfig(router_reset_states=True, router_snapshot_threshold=None)
    assert [text.split(" has no")[0] for text in config.cluster_flags().without_effect(field)] == [
        "router_reset_states",
        "router_snapshot_threshold",
    ]
    monkeypatch.setenv("NATS_SERVER", "nats://10.0.0.1:4222")
    (server,) = ClusterFlags().without_effect(flag)
    assert server.startswith("NATS_SERVER has no effect on KV events without --event-plane nats")
    nats = ClusterFlags(event_plane="nats", router_reset_states=True, router_snapshot_threshold=5)
    assert nats.without_effect(flag) == []
    (reset,) = nats.without_effect(flag, uses_events=False)
    assert reset.startswith("the workers' stream is not reset")


@pytest.mark.parametrize("make", [_core.Frontend, _core.Router])
def test_events_are_followed_only_if_they_can_matter(make):
    assert make().uses_events
    for off in (
        {"use_kv_events": False},
        {"overlap_score_weight": 0.0},
        {"overlap_score_credit": 0.0},
        {"remote_indexer": "http://127.0.0.1:9"},
    ):
        assert not make(**off).uses_events


def test_a_setting_that_is_not_known_is_refused_with_what_was_meant():
    with pytest.raises(TypeError, match=r"no setting 'router_temprature'; did you mean 'router_te"):
        KvRouterConfig(router_temprature=1)
    with pytest.raises(TypeError, match=r"KvRouterConfig has no setting 'zzz'$"):
        KvRouterConfig(zzz=1)
    config = KvRouterConfig(router_temperature=0.5)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, router_temperature=0.0) == KvRouterConfig()
