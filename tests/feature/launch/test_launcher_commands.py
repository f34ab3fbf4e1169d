"""Command lines of real engines: what is added, what stays, what is understood."""

from __future__ import annotations

import json

import pytest

from kvflash import sglang, vllm
from kvflash.errors import ConfigError
from kvflash.launcher.command import Arguments, EventPorts
from kvflash.launcher.options import parse_options

BUILDERS = {"vllm": vllm, "sglang": sglang}


def build(engine, line):
    module = BUILDERS[engine]
    options, arguments = parse_options(engine, module.PROGRAM, line.split())
    return module.build(options, arguments, "10.1.2.3")


def flag(command, name):
    index = command.words.index(name)
    assert command.words.count(name) == 1
    return command.words[index + 1]


def test_vllm_gets_ports_events_and_token_counts():
    command = build("vllm", "org/model --block-size 32 --max-model-len 2048")
    assert command.words[:3] == ["vllm", "serve", "org/model"]
    assert (command.model_path, command.block_size, command.ranks) == ("org/model", 32, 1)
    assert flag(command, "--max-model-len") == "2048"
    assert flag(command, "--port") == str(command.port)
    assert "--enable-prompt-tokens-details" in command.words
    assert "--kv-transfer-config" not in command.words
    config = json.loads(flag(command, "--kv-events-config"))
    assert config == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": "kv-events",
        "endpoint": f"tcp://*:{command.events.port}",
        "replay_endpoint": f"tcp://*:{command.events.replay_port}",
    }
    assert command.events == EventPorts.of(config)


@pytest.mark.parametrize(
    ("flags", "reported", "size"),
    [
        ("", 16, 16),
        ("", None, None),
        ("--block-size 32", 16, 32),
        ("-dcp 2", 16, 32),
        ("--decode-context-parallel-size=2 --prefill-context-parallel-size 4", 16, 128),
        ("--block-size 32 -dcp 2", None, 64),
    ],
)
def test_context_parallelism_makes_blocks_of_events_larger(flags, reported, size):
    assert build("vllm", f"m {flags}").event_block_size(reported) == size


def test_flags_with_underscores_are_understood():
    command = build("vllm", "--block_size=32 --enable_prompt_tokens_details --model m --api_key k")
    words = ["m", "--block_size=32", "--enable_prompt_tokens_details", "--api_key", "k", "--port"]
    assert command.words[2:8] == words
    assert (command.block_size, command.api_key) == (32, "k")
    arguments = Arguments(["--a_b", "1", "--a-b=2", "c_d"])
    assert (arguments.drop("--a-b"), arguments.words) == ("2", ["c_d"])


def test_what_is_said_to_vllm_stays():
    config = '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557"}'
    command = build(
        "vllm",
        f"--model=m --port=9001 --enable-prompt-tokens-details --kv-events-config {config} "
        "--data-parallel-size 3 --host 10.0.0.5",
    )
    assert command.words[2:] == [
        "m", "--port=9001", "--enable-prompt-tokens-details", "--kv-events-config", config,
        "--data-parallel-size", "3", "--host", "10.0.0.5",
    ]  # fmt: skip
    assert (command.port, command.host, command.ranks) == (9001, "10.0.0.5", 3)
    assert command.events.endpoints("10.0.0.5", 2) == [
        ("tcp://10.0.0.5:5557", None),
        ("tcp://10.0.0.5:5558", None),
    ]


def test_without_events_nothing_is_announced():
    command = build("vllm", "m --no-kv-events")
    assert command.events is None
    assert "--kv-events-config" not in command.words
    for off in (
        '{"enable_kv_cache_events":false,"publisher":"null"}',
        '{"enable_kv_cache_events":false,"publisher":"zmq"}',
        # vLLM's default is false.
        '{"publisher":"zmq","endpoint":"tcp://*:5557"}',
    ):
        assert build("vllm", f"m --kv-events-config {off}").events is None
    on = '{"publisher":"zmq","endpoint":"tcp://*:5557"}'
    assert build("sglang", f"--model m --kv-events-config {on}").events is not None


@pytest.mark.parametrize(
    ("config", "is_told"),
    [
        ('{"publisher":"zmq","endpoint":"tcp://*:5557"}', True),
        # An endpoint where nothing is published need not be announced.
        ('{"publisher":"zmq","endpoint":"ipc:///tmp/x"}', True),
        ('{"enable_kv_cache_events":false,"publisher":"zmq"}', False),
    ],
)
def test_a_config_that_leaves_events_off_by_mistake_is_told(config, is_told, caplog):
    assert build("vllm", f"m --kv-events-config {config}").events is None
    warning = '--kv-events-config lacks "enable_kv_cache_events": true, so the engine publishes no'
    assert (warning in caplog.text) is is_told


def test_vllm_in_a_role_has_a_connector():
    command = build("vllm", "m --is-prefill-worker")
    assert json.loads(flag(command, "--kv-transfer-config"))["kv_connector"] == "NixlConnector"
    own = '{"kv_connector":"Mine"}'
    command = build("vllm", f"m --disaggregation-mode decode --kv-transfer-config {own}")
    assert flag(command, "--kv-transfer-config") == own


def test_sglang_gets_ports_events_and_cache_reports():
    command = build("sglang", "--model-path org/model --page-size 32 --dp-size 2")
    assert command.words[1:3] == ["-m", "sglang.launch_server"]
    assert (command.model_path, command.block_size, command.ranks) == ("org/model", 32, 2)
    assert flag(command, "--host") == command.host == "10.1.2.3"
    assert "--enable-cache-report" in command.words
    assert "--disaggregation-mode" not in command.words
    config = json.loads(flag(command, "--kv-events-config"))
    assert set(config) == {"publisher", "topic", "endpoint", "replay_endpoint"}
    first, second = command.events.endpoints("h", 2)
    assert first[0] == f"tcp://h:{command.events.port}"
    assert second[0] == f"tcp://h:{command.events.port + 1}"
    # The ranks' replay ports come behind those of their events.
    assert command.events.replay_port == command.events.port + 2


def test_sglang_knows_roles_itself():
    command = build("sglang", "--model-path m --is-prefill-worker")
    assert flag(command, "--disaggregation-mode") == "prefill"
    assert command.bootstrap_port == 8998
    command = build(
        "sglang",
        "--model-path m --disaggregation-mode prefill --disaggregation-bootstrap-port 9000",
    )
    assert command.bootstrap_port == 9000
    command = build("sglang", "--model-path m --disaggregation-mode decode")
    assert flag(command, "--disaggregation-mode") == "decode"
    assert command.bootstrap_port is None


@pytest.mark.parametrize(
    ("engine", "line", "wanted"),
    [
        ("vllm", "--port 9000", "vLLM needs a model"),
        ("vllm", "m --port many", "--port must be a number, got 'many'"),
        ("vllm", "m --port", "--port needs a value"),
        ("vllm", "m --kv-events-config {", "--kv-events-config must be JSON"),
        ("vllm", "m --kv-events-config 1", "--kv-events-config must be a JSON object, got 1"),
        (
            "vllm",
            'm --kv-events-config {"enable_kv_cache_events":true,"publisher":"zmq",'
            '"endpoint":"ipc:///tmp/x"}',
            "endpoint must be tcp://*:PORT to be announced, got 'ipc:///tmp/x'",
        ),
        ("sglang", "--port 9000", "SGLang needs a model"),
        ("vllm", "m --ssl-keyfile k", "--ssl-keyfile: a launched engine is reached over plain"),
        ("vllm", "m --uds=/tmp/x", "--uds: a launched engine is reached over plain HTTP"),
        ("sglang", "--model-path m --ssl_certfile c", "--ssl-certfile: a launched engine"),
    ],
)
def test_what_cannot_be_announced_is_refused(engine, line, wanted):
    with pytest.raises(ConfigError) as caught:
        build(engine, line)
    assert wanted in str(caught.value)


def test_flags_of_ours_are_not_passed_on():
    line = "--endpoint a.b.c --engine-command 'run me' --ready-timeout 5 -- m --port 1"
    words = line.replace("'run me'", "run").split()
    options, arguments = parse_options("vllm", vllm.PROGRAM, words)
    assert (options.endpoint, options.program, options.ready_timeout_s) == ("a.b.c", ["run"], 5.0)
    assert arguments.words == ["m", "--port", "1"]
    assert parse_options("vllm", vllm.PROGRAM, [])[0].endpoint == "dynamo.backend.generate"
    prefill, _ = parse_options("vllm", vllm.PROGRAM, ["--is-prefill-worker"])
    assert prefill.endpoint == "dynamo.prefill.generate"


@pytest.mark.parametrize(
    "line",
    [
        "--ready-timeout 0",
        "--disaggregation-mode x",
        "--is-prefill-worker --is-decode-worker",
        "--engine-command '",
        "--engine-command=",
    ],
)
def test_wrong_flags_of_ours_end_with_status_2(line, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_options("vllm", vllm.PROGRAM, line.split())
    assert caught.value.code == 2
    assert line.split()[0].rstrip("=") in capsys.readouterr().err


def test_arguments_are_found_in_both_spellings():
    arguments = Arguments(["--a", "1", "--b=2", "--a=3", "--c"])
    assert (arguments.value("--a"), arguments.value("--b", "--x")) == ("3", "2")
    assert arguments.drop("--a") == "3"
    assert arguments.words == ["--b=2", "--c"]
    doubled = Arguments(["--a", "--a", "x", "y"])
    assert (doubled.drop("--a"), doubled.words) == ("--a", ["x", "y"])
    arguments.add("--c")
    arguments.add("--d", 4)
    assert arguments.words == ["--b=2", "--c", "--d", "4"]
