"""The router as a process: its flags, its life, and what its manual says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from kvflash.errors import ConfigError
from kvflash.router import parse_args
from kvflash.settings import table
from service import Engine, batch, stored, until

MANUAL = Path(__file__).parents[3] / "docs" / "router.md"
LOCAL = ("--port", "0", "--host", "127.0.0.1")
IDS = list(range(1, 33))


@pytest.fixture
def engine():
    made = Engine()
    yield made
    made.close()


def test_a_gateway_s_day(run, client, engine):
    """Register by flag, select what holds the prompt, end on SIGTERM; a new process begins anew."""
    spec = f"http://gpu-1:8000,events={engine.endpoint},replay={engine.replay_endpoint},id=7"
    flags = (*LOCAL, "--worker", spec, "--worker", "http://gpu-2:8000", "--block-size", "16")
    router = run("kvflash.router", *flags, "--model-name", "m")
    http = client(router.ready()["url"])
    engine.wait_for_subscriber()
    engine.publish(batch(stored([1, 2], IDS, block_size=16)))

    def holds():
        return http.post("/select", {"token_ids": IDS})["overlap_blocks"] == 2

    until(holds, "the stored blocks")
    answer = http.post("/reserve", {"token_ids": IDS, "request_id": "r"})
    assert (answer["worker_id"], answer["url"]) == (7, "http://gpu-1:8000")
    assert [worker["worker_id"] for worker in http.get("/workers")] == [1, 7]
    assert router.terminate() == 0
    # Reservations are the process's; blocks come again from the engine's replay.
    again = run("kvflash.router", *flags, "--model-name", "m")
    http = client(again.ready()["url"])
    until(holds, "the replayed blocks")
    assert http.post("/free", {"request_id": "r"})["freed"] is False
    http.post("/reserve", {"token_ids": IDS, "request_id": "r"})


def test_bad_flags_end_the_process_with_their_names(run):
    for flags, wanted in [
        (("--endpoint", "a.b"), "--endpoint"),
        (("--endpoint", "a.b.c.d"), "exactly three parts"),
        (("--worker", "http://a,port=1"), "port=1"),
        (("--worker", "http://a,events=nowhere"), "--worker http://a"),
        (("--router-temperature", "-1"), "--router-temperature"),
        (("--serve-indexer", "--use-remote-indexer", "http://a:1"), "--serve-indexer"),
        (("--use-remote-indexer", "tcp://a:1"), "--use-remote-indexer"),
    ]:
        process = run("kvflash.router", *LOCAL, *flags)
        assert process.popen.wait(30) == 2
        process.close()
        assert wanted in "".join(process.errors), (flags, process.errors)


def test_flags_have_their_names_and_variables(monkeypatch):
    args = parse_args([])
    assert (args.port, args.router_mode, args.kv_cache_block_size) == (8091, None, None)
    assert (args.router_ttl, args.router_max_tree_size) == (120.0, 1_048_576)
    assert parse_args(["--block-size", "128"]).kv_cache_block_size == 128
    assert parse_args(["--router-block-size", "None"]).kv_cache_block_size is None
    off = parse_args(["--no-kv-events", "--no-track-active-blocks", "--no-router-assume-kv-reuse"])
    assert (off.use_kv_events, off.track_active_blocks, off.assume_kv_reuse) == (False,) * 3
    assert parse_args(["--busy-threshold", "0.5"]).active_decode_blocks_threshold == 0.5
    monkeypatch.setenv("DYN_ROUTER_ENDPOINT", "ns.backend.generate")
    monkeypatch.setenv("DYN_KV_EVENTS", "false")
    monkeypatch.setenv("KVFLASH_ROUTER_TEMPERATURE", "0.5")
    args = parse_args([])
    assert (args.endpoint, args.use_kv_events) == ("ns.backend.generate", False)
    assert args.router_temperature == 0.5
    with pytest.raises(ConfigError, match="dp must be a number"):
        parse_args(["--worker", "http://a,dp=0"])


def test_every_flag_is_in_the_manual():
    # Flags of all routers are documented in the manuals of routing and of replicas.
    pages = ("router", "routing", "cluster")
    manual = "".join((MANUAL.parent / f"{page}.md").read_text("utf-8") for page in pages)
    flags = {flag for one in table("router") for flag in one.flags}
    assert len(flags) > 30
    assert sorted(flag for flag in flags if f"`{flag}" not in manual) == []


def examples() -> list[tuple[str, str]]:
    """The manual's commands, each with what is said to come out, if anything is."""
    found = []
    for block in re.findall(r"((?:^    .*\n)+)", MANUAL.read_text(encoding="utf-8"), re.MULTILINE):
        text = re.sub(r"^    ", "", block, flags=re.MULTILINE)
        if text.startswith("curl"):
            command, _, answer = text.partition("\n{")
            found.append((command.replace("\\\n", ""), "{" + answer if answer else ""))
    return found


def test_the_manual_s_examples_work(run, client):
    router = run("kvflash.router", *LOCAL)
    url = router.ready()["url"]
    commands = examples()
    assert len(commands) >= 10
    for command, answer in commands:
        words = shlex.split(command.replace("localhost:8091", url.removeprefix("http://")))
        assert words[0] == "curl"
        done = subprocess.run(
            [*words, "-w", "\n%{http_code}"], capture_output=True, text=True, check=True, timeout=60
        )
        body, _, status = done.stdout.rpartition("\n")
        assert status in ("200", "201"), (command, done.stdout)
        if answer:
            assert json.loads(answer).items() <= json.loads(body).items(), (command, body)
