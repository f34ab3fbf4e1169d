"""Takes the command line that a launcher builds for vLLM or SGLang, and runs a mocker with it."""

from __future__ import annotations

import json
import os
import sys
from urllib.parse import urlsplit


def value(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def main() -> None:
    if value("--fail-with", ""):
        sys.exit(int(value("--fail-with", "")))
    config = json.loads(value("--kv-events-config", "{}"))
    ports = {
        "--zmq-events-port": str(urlsplit(config.get("endpoint", "tcp://*:0")).port),
        "--zmq-replay-port": str(urlsplit(config.get("replay_endpoint", "tcp://*:0")).port),
    }
    words = ["--port", value("--port", "0"), "--block-size", value("--block-size", "16")]
    words += [
        "--model-name",
        value("--served-model-name", "fake"),
        "--speedup-ratio",
        value("--speed", "1000"),
    ]
    words += ["--drain-timeout", value("--engine-drain", "20")]
    words += ["--num-gpu-blocks", "300", "--lora-adapters", "sql"]
    for flag, port in ports.items():
        words += [flag, port]
    os.execv(sys.executable, [sys.executable, "-m", "kvflash.mocker", *words])


if __name__ == "__main__":
    main()
