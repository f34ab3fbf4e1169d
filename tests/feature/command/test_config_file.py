"""The file of --config: every flag of a service, in YAML, TOML or JSON."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvflash.flags import Flags
from kvflash.frontend.args import parse_args as frontend
from kvflash.indexer.args import WorkerEntry
from kvflash.indexer.args import parse_args as indexer
from kvflash.mocker.args import parse_args as mocker
from kvflash.mocker.config import MockerConfig
from kvflash.router.args import parse_args as router
from kvflash.router.args import parse_worker

Write = Callable[..., str]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the caller must not reach in."""
    for name in [*os.environ]:
        if name.startswith(("KVFLASH_", "DYN_")):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Write:
    """Writes a file and says where."""

    def write(text: str, name: str = "kvflash.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def refused(capsys: pytest.CaptureFixture[str], parse: Any, *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


FRONTEND_YAML = """\
# What a frontend needs.
port: 8123
host: "::1"
tokenizer: /models/llama
tokenizer-cache: 8MiB
router_mode: kv
router-temperature: 1e-1
router-queue-threshold:      # nothing is None
enforce-disagg: until-first-prefill
discovery: none
kv-events: false
log-decisions: true
workers:
  - http://a:8000,events=tcp://a:5557
  - url: http://b:8000
    events: tcp://b:5557
    id: 7
fairness: vtc-fair
fairness-weight: {alice: 2, bob: 0.5}
tls-cert-path: /cert.pem
"""
FRONTEND_TOML = """\
port = 8123
host = "::1"
tokenizer = "/models/llama"
tokenizer-cache = "8MiB"
router_mode = "kv"
router-temperature = 0.1
router-queue-threshold = "None"
enforce-disagg = "until-first-prefill"
discovery = "none"
kv-events = false
log-decisions = true
fairness = "vtc-fair"
tls-cert-path = "/cert.pem"
[fairness-weight]
alice = 2
bob = 0.5
[workers."http://a:8000"]
events = "tcp://a:5557"
[workers."http://b:8000"]
events = "tcp://b:5557"
id = 7
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [(FRONTEND_YAML, "a.yaml"), (FRONTEND_YAML, "a.yml"), (FRONTEND_YAML, "mounted"),
     (FRONTEND_TOML, "a.toml")],
)  # fmt: skip
def test_a_frontend_is_described_by_a_file(file: Write, text: str, name: str) -> None:
    args = frontend(["--config", file(text, name)])
    workers = ["http://a:8000,events=tcp://a:5557", "http://b:8000,events=tcp://b:5557,id=7"]
    assert args == frontend([
        "--port", "8123", "--host", "::1", "--tokenizer", "/models/llama", "--tokenizer-cache",
        "8MiB", "--router-mode", "kv", "--router-temperature", "0.1", "--router-queue-threshold",
        "None", "--enforce-disagg", "until-first-prefill", "--discovery", "none", "--no-kv-events",
        "--log-decisions", "--worker", *workers, "--fairness", "vtc-fair", "--fairness-weight",
        "alice=2,bob=0.5", "--tls-cert-path", "/cert.pem",
    ])  # fmt: skip


def test_tokenizers_of_models_are_a_mapping(file: Write) -> None:
    args = frontend(["--config", file("tokenizer: {org/a: /models/a, b: org/b}")])
    assert list(args.tokenizer) == ["org/a=/models/a", "b=org/b"]
    args = frontend(["--config", file("tokenizer: /models/a")])
    assert list(args.tokenizer) == ["/models/a"]


def test_the_other_services_are_described_by_files(file: Write) -> None:
    args = router(["--config", file(
        "model-name: m\nblock-size: 16\nworker: http://a:1,id=3\nendpoint: a.b.c"
    )])  # fmt: skip
    assert args.workers == (parse_worker("http://a:1,id=3"),)
    assert (args.workers[0]["url"], args.workers[0]["worker_id"]) == ("http://a:1", 3)
    assert (args.model_name, args.kv_cache_block_size, args.endpoint) == ("m", 16, "a.b.c")
    entries = (
        WorkerEntry(instance_id=1, dp_rank=0, endpoint="tcp://a:1"),
        WorkerEntry(instance_id=2, dp_rank=1, endpoint="tcp://b:1"),
    )
    for workers in (
        "workers: 1=tcp://a:1,2:1=tcp://b:1",
        "workers: ['1=tcp://a:1', '2:1=tcp://b:1']",
        "workers:\n  1: tcp://a:1\n  2:1: tcp://b:1",
    ):
        peers = "peers: [http://x:1, http://y:1]"
        found = indexer(["--config", file(f"{workers}\n{peers}\nblock-size: 64\n")])
        assert (found.workers, found.peers) == (entries, ("http://x:1", "http://y:1"))
    config, level = mocker(["--config", file(
        "num-workers: 2\nport: 0\nzmq-events-port: auto\nlora-adapters: [a, b]\n"
        "is-prefill-worker: true\nbootstrap-ports: [7001, 7002]\nlog-level: debug\n"
        "enable-prefix-caching: false\nspeedup-ratio: 10\ndrain-timeout: 1.5\n"
    )])  # fmt: skip
    assert (config.num_workers, config.port, config.zmq_events_port) == (2, 0, "auto")
    assert (config.lora_adapters, config.role, level) == (("a", "b"), "prefill", "debug")
    assert config.bootstrap_ports == (7001, 7002)
    assert (config.enable_prefix_caching, config.speedup_ratio) == (False, 10.0)
    assert config.drain_timeout_s == 1.5


@pytest.mark.parametrize("parse", [frontend, router, indexer])
def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    parse: Any, file: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file("port: 1111\nlog-level: debug\n")
    monkeypatch.setenv("KVFLASH_CONFIG", path)
    assert (parse([]).port, parse([]).log_level) == (1111, "debug")
    monkeypatch.setenv("KVFLASH_PORT", "2222")
    assert (parse([]).port, parse([]).log_level) == (2222, "debug")
    assert parse(["--port", "3333"]).port == 3333
    # The flag's file goes before the variable's.
    assert parse(["--config", file("{}", "empty")]).log_level == "info"


def test_a_variable_of_spaces_says_nothing(file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_WORKER", " ")
    args = frontend(["--config", file("worker: [http://f:1]")])
    assert args.workers == ["http://f:1"]


def test_the_mocker_reads_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_PORT", "2222")
    monkeypatch.setenv("KVFLASH_BLOCK_SIZE", "2")
    monkeypatch.setenv("KVFLASH_NO_KV_EVENTS", "1")
    assert mocker([]) == (MockerConfig(), "info")


def test_the_file_of_routing_goes_before_that_of_all(file: Write) -> None:
    routing = file("router-mode: random\nload-aware: false\n", "routing.yaml")
    every = file(f"router-policy-config: {routing}\nrouter-mode: kv\nseed: 5\n", "all.yaml")
    args = frontend(["--config", every])
    assert (args.router_mode, args.seed) == ("random", 5)
    other = file("router-mode: least-loaded", "other.yaml")
    args = frontend(["--config", every, "--router-policy-config", other])
    assert (args.router_mode, args.seed) == ("least-loaded", 5)
    # A preset of the one gives way to what the other says.
    preset = file("load-aware: true", "preset.yaml")
    args = frontend(["--config", preset, "--router-policy-config", file("kv-events: true", "kv")])
    assert (args.router_mode, args.use_kv_events, args.assume_kv_reuse) == ("kv", True, False)


@pytest.mark.parametrize("parse", [frontend, router, indexer, mocker])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot: 80", "unknown key 'prot' (line 1); did you mean 'port'?"),
        ("config: x", "unknown key 'config' (line 1)"),
        ("quux: 1", "unknown key 'quux' (line 1); a key is a flag of --help"),
        ("port: [1]", "port: must be a string, a number or null, got [1]"),
        ("port: true", "port: must be a string, a number or null, got true"),
        ("port: {a: 1}", 'port: must be a string, a number or null, got {"a": 1}'),
        ("port: 1\nport: 2", "'port' (line 1) and 'port' (line 2) set the same thing; keep one"),
        ("- port", "must be a mapping of flags to values, got a list"),
        ("port", "must be a mapping of flags to values, got a str"),
        ("port: 1\n  host: x", "is not YAML: line 2, column "),
        ("port: *x", "is not YAML: line 1, column 7: found undefined alias"),
        ("!!python/object/apply:os.system [ls]", "is not YAML: line 1, column 1: could not"),
        # Not many more than it takes: PyYAML looks at all open brackets at every other one.
        ("port: " + "[" * 600, "is not YAML: maximum recursion depth exceeded"),
        ("port: \x00", "is not YAML: "),
        ("port: !!bool maybe", "is not YAML: a value does not fit its tag (!!...): leave the tag"),
        ('port: !!int ""', "is not YAML: a value does not fit its tag (!!...): leave the tag"),
        ("port: !!timestamp x", "is not YAML: a value does not fit its tag (!!...): leave the tag"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(
    parse: Any, text: str, told: str, file: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(text)
    assert f": error: --config {path}: {told}" in refused(capsys, parse, "--config", path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("enforce-disagg: sometimes", "must be one of off, until-first-prefill, always, got"),
        ("kv-events: no", 'kv-events: must be true or false, got "no"'),
        ("worker: 5", "worker: must be a list of strings, got 5"),
        ("worker: [[a]]", 'worker: must be a list of strings, got [["a"]]'),
        ("worker: [{events: tcp://a:1}]", 'a worker needs a url, got {"events": "tcp://a:1"}'),
        (
            "worker: [{url: http://a, id: 1,\n  id: 2}]",
            "'worker[0].id' (line 1) and 'worker[0].id' (line 2) set",
        ),
        ("worker: {http://a: {url: http://b}}", "worker: 'url' and 'url' (line 1) set the same"),
        ("worker: [{url: 'http://a,id=1'}]", "'http://a,id=1' must not contain a comma or a space"),
        ("worker: a\n\nworkers: b", "'worker' (line 1) and 'workers' (line 3) set the same thing"),
    ],
)
def test_what_is_wrong_with_a_frontends_file_is_named(
    text: str, told: str, file: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, frontend, "--config", file(text))


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        ("port = ", "a.toml", "is not TOML: "),
        ("port = 1\nport = 2", "a.toml", "is not TOML: "),
        ('{"port": }', "a.json", "is not JSON: "),
        ('{"port": }', "mounted", "is not JSON: "),
        ("port: 1", "a.json", "is not JSON: "),
    ],
)
def test_the_form_goes_by_the_name(
    text: str, name: str, told: str, file: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, frontend, "--config", file(text, name))


TWICE = "set the same thing; keep one of them"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.yaml", "t:\n  a: {path: 1}\n  a: 2", f"'t.a' (line 2) and 't.a' (line 3) {TWICE}"),
        ("a.yaml", "t:\n- b: {'x y': 1,\n 'x y': 2}", "'t[0].b.\"x y\"' (line 2) and 't[0].b."),
        ("a.yaml", "t: &a {b: {c: 1, c: 2}}\nu: *a", "'t.b.c' (line 1) and 't.b.c' (line 1) "),
        ("a.json", '{"t": {"path": 1, "path": 2}}', f"'t.path' and 't.path' {TWICE}"),
        ("a.json", '{"t": [1, {"u": {"v": 1, "v": 2}}]}', f"'t[1].u.v' and 't[1].u.v' {TWICE}"),
        ("a.toml", "t = [\n1]\nt = [\n1]\n", "Cannot overwrite a value (at line 4, column 3)"),
        ("a.toml", "t = {a = 1, a = 2}\n", "Duplicate inline table key 'a' (at line 1, "),
    ],
)  # fmt: skip
def test_a_key_that_is_there_twice_is_named_with_its_place(
    name: str, text: str, told: str, file: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, frontend, "--config", file(text, name))


def test_aliases_that_repeat_a_value_without_end_are_read_once(
    file: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"x{number}" for number in range(40)]
    lines = ["x0: &x0 [1]"]
    lines += [f"{new}: &{new} [*{old}, *{old}]" for old, new in itertools.pairwise(names)]
    assert "unknown key 'x0'" in refused(capsys, frontend, "--config", file("\n".join(lines)))


def test_words_mean_what_they_look_like(file: Write) -> None:
    flags = Flags("test", "")
    flags.add_file("--config", summary="")
    for name in ("a", "b", "c", "d", "e", "f"):
        flags.add(f"--{name}", parse=str, default=None, summary="")
    args = flags.parse(["--config", file("a: off\nb: 1:30\nc: 010\nd: 2026-01-01\ne: y\nf: 1_0")])
    assert [*vars(args).values()] == ["off", "1:30", "010", "2026-01-01", "y", "1_0"]


def test_bare_words_for_a_mode(file: Write) -> None:
    for text, wanted in (("true", "always"), ("false", "off"), ("off", "off")):
        assert frontend(["--config", file(f"enforce-disagg: {text}")]).enforce_disagg == wanted


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_file_changes_nothing(text: str, file: Write) -> None:
    assert frontend(["--config", file(text)]) == frontend([])


# -- Dynamo's file of --router-policy-config

ONE_CLASS = """\
default_policy_family: standard
uncached_isl_buckets:
  - min_tokens: 0
    bucket: all
policy_classes:
  - name: standard
    policy_family: standard
    cache_bucket: all
    queue_policy: wspt
    quantum: 1
    prefill_busy_threshold_frac: 4
"""


@pytest.mark.parametrize("parse", [frontend, router])
def test_dynamos_policy_file_is_understood(parse: Any, file: Write) -> None:
    flag = "--router-policy-config"
    wanted = parse(["--router-queue-policy", "wspt", "--router-queue-threshold", "4"])
    assert parse([flag, file(ONE_CLASS)]) == wanted
    assert parse([flag, file(ONE_CLASS), "--router-queue-policy", "lcfs"]) == parse(
        ["--router-queue-policy", "lcfs", "--router-queue-threshold", "4"]
    )
    plain = ONE_CLASS.replace("    queue_policy: wspt\n", "").replace(
        "    prefill_busy_threshold_frac: 4\n", ""
    )
    assert parse([flag, file(plain)]) == parse([])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda classes: classes * 2,
            "policy_classes has 2 classes, and kvflash has one queue per model; keep one class",
        ),
        (lambda _: [], "policy_classes must be a list with a class"),
        (lambda _: [3], "policy_classes: a class must be a mapping"),
        (
            lambda classes: [{**classes[0], "request_queue_limit_per_worker": 5}],
            "'request_queue_limit_per_worker' (line 1) of Dynamo's policy file is not supported: "
            "use router-queue-limit",
        ),
        (
            lambda classes: [{**classes[0], "queue_policy": "edf"}],
            "router-queue-policy: must be one of fcfs, lcfs, wspt, got 'edf'",
        ),
    ],
)
def test_what_dynamos_file_says_beyond_is_refused_by_name(
    change: Any, told: str, file: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    classes = [{"name": "a", "policy_family": "a", "cache_bucket": "all", "quantum": 1}]
    content = {"default_policy_family": "a", "policy_classes": change(classes)}
    path = file(json.dumps(content))
    assert told in refused(capsys, frontend, "--router-policy-config", path)


def test_other_parts_of_dynamos_file_are_refused_by_name(
    file: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, told in (
        ("models: {m: {}}", "'models' (line 1) of Dynamo's policy file is not supported: start"),
        ("worker_selection: {}", "'worker_selection' (line 1) of Dynamo's policy file is not"),
        (ONE_CLASS + "seed: 3\n", "'seed' (line 12) of Dynamo's policy file is not supported"),
    ):
        assert told in refused(capsys, frontend, "--router-policy-config", file(text))
