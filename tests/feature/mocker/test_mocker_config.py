"""Options and flags: defaults, what is legal, and errors that name the flag."""

from __future__ import annotations

import pytest

from kvflash.mocker.args import parse_args
from kvflash.mocker.config import MockerConfig


def test_flags_and_options_have_the_same_defaults() -> None:
    assert parse_args([]) == (MockerConfig(), "info")


def test_every_flag_reaches_its_option() -> None:
    command = """--host 0.0.0.0 --port 9000 --num-workers 2 --model-name m --block-size 16
        --num-gpu-blocks-override 100 --max-num-seqs 8 --max-num-batched-tokens 64
        --max-model-len 48 --watermark 0.1 --speedup-ratio 10 --no-enable-prefix-caching
        --no-enable-chunked-prefill --max-waiting 5 --zmq-events-port auto
        --zmq-replay-port 6000 --event-era positional --event-topic t --replay-buffer 7
        --data-parallel-rank 3 --startup-time 0.5 --tokenizer folder --lora-adapters a b
        --drain-timeout 1.5 --log-level error --endpoint a.b.c --no-kv-events
        --is-prefill-worker --bootstrap-ports 7001,7002"""
    config, log_level = parse_args(command.split())
    assert log_level == "error"
    assert config == MockerConfig(
        host="0.0.0.0",
        port=9000,
        num_workers=2,
        model_name="m",
        block_size=16,
        num_gpu_blocks=100,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=48,
        watermark=0.1,
        speedup_ratio=10.0,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        max_waiting=5,
        zmq_events_port="auto",
        zmq_replay_port=6000,
        event_era="positional",
        event_topic="t",
        replay_buffer=7,
        data_parallel_rank=3,
        startup_time_s=0.5,
        tokenizer="folder",
        lora_adapters=("a", "b"),
        drain_timeout_s=1.5,
        endpoint="a.b.c",
        kv_events=False,
        role="prefill",
        bootstrap_ports=(7001, 7002),
    )


@pytest.mark.parametrize(
    ("flags", "role"),
    [
        ("--is-decode-worker", "decode"),
        ("--disaggregation-mode decode", "decode"),
        ("--disaggregation-mode prefill", "prefill"),
        ("--disaggregation-mode agg", "both"),
    ],
)
def test_roles_have_two_spellings(flags: str, role: str) -> None:
    assert parse_args(flags.split())[0].role == role


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--block-size 0", "--block-size must be at least 1, got 0"),
        ("--num-gpu-blocks -1", "--num-gpu-blocks must be at least 1"),
        ("--block-size x", "argument --block-size: must be a whole number, got 'x'"),
        ("--num-workers 1.5", "argument --num-workers: must be a whole number, got '1.5'"),
        ("--watermark x", "argument --watermark: must be a number, got 'x'"),
        ("--port 65536", "--port must be in 0..=65535"),
        ("--port 65535 --num-workers 2", "--port must be in 0..=65534 for 2 workers"),
        ("--zmq-events-port 70000", "--zmq-events-port must be in 0..=65535"),
        ("--zmq-events-port soon", "--zmq-events-port: must be a port, 0 or auto, got 'soon'"),
        ("--zmq-replay-port 6000", "--zmq-replay-port needs --zmq-events-port"),
        (
            "--num-workers 2 --zmq-events-port 19400 --zmq-replay-port 19401",
            "--zmq-events-port 19400..=19401 and --zmq-replay-port 19401..=19402 overlap",
        ),
        (
            "--zmq-events-port 7000 --zmq-replay-port 7000",
            "so --zmq-replay-port must be 7001 or more",
        ),
        (
            "--num-workers 4 --port 5555 --zmq-events-port 5557",
            "--port 5555..=5558 and --zmq-events-port 5557..=5560 overlap",
        ),
        ("--is-prefill-worker --is-decode-worker", "not allowed with argument"),
        ("--disaggregation-mode both-ways", "must be agg, prefill or decode, got 'both-ways'"),
        ("--data-parallel-size 2", "--data-parallel-size needs --endpoint"),
        ("--endpoint a.b.c --data-parallel-size 2 --data-parallel-rank 1", "contradicts"),
        ("--bootstrap-ports 7001", "--bootstrap-ports needs --is-prefill-worker"),
        ("--is-prefill-worker --bootstrap-ports 1,2", "must name 1 distinct ports"),
        ("--is-prefill-worker --bootstrap-ports 70000", "must be in 1..=65535, got 70000"),
        (
            "--is-prefill-worker --port 7000 --bootstrap-ports 7000",
            "--bootstrap-ports 7000..=7000 and --port 7000..=7000 overlap",
        ),
        (
            "--is-prefill-worker --num-workers 2 --zmq-events-port 70 --bootstrap-ports 71,69",
            "so --bootstrap-ports must be 72 or more",
        ),
        ("--is-prefill-worker --bootstrap-ports a", "must be ports, separated by commas, got 'a'"),
        ("--watermark 1", "--watermark must be in [0, 1), got 1.0"),
        ("--watermark 0.9 --num-gpu-blocks 5", "--watermark 0.9 leaves no block"),
        ("--speedup-ratio 0", "--speedup-ratio must be above 0"),
        ("--speedup-ratio nan", "--speedup-ratio must be above 0"),
        ("--speedup-ratio inf", "--speedup-ratio must be above 0 and finite, got inf"),
        ("--startup-time -1", "--startup-time must be at least 0"),
        ("--startup-time nan", "--startup-time must be at least 0, got nan"),
        ("--drain-timeout -1", "--drain-timeout must be at least 0"),
        ("--event-era new", "--event-era: invalid choice: 'new'"),
        ("--max-num-batched-tokens 255", "must be at least --max-num-seqs (256)"),
        ("--num-gpu-blocks 10 --watermark 0 --max-model-len 641", "must be in 1..=640"),
        ("--no-enable-chunked-prefill --max-model-len 8193", "must be in 1..=8192"),
        ("--max-model-len 0", "--max-model-len must be in 1..="),
        ("--model-name a --lora-adapters b a", "--lora-adapters must be distinct"),
        ("--block 16", "unrecognized arguments: --block 16"),
    ],
)
def test_errors_name_the_flag(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse_args(flags.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_longest_request_follows_from_the_cache() -> None:
    fitting = MockerConfig(num_gpu_blocks=100, block_size=16, watermark=0.1)
    assert fitting.model_len == 90 * 16
    whole = MockerConfig(enable_chunked_prefill=False)
    assert whole.model_len == 8192
    assert MockerConfig(max_model_len=10).model_len == 10
