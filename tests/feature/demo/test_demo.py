"""The demo as its users run it, its processes included."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.child import ChildError, Children
from service import DEADLINE_S, Http, Process, until

ROOT = Path(__file__).parents[3]
# The demo is not installed: it is found beside the tests.
PATHS = {"PYTHONPATH": str(ROOT)}
TINY = ("--quick", "--no-plot", "--conversations", "6", "--turns", "2", "--speedup-ratio", "20")


def children_of(pid: int) -> list[int]:
    """Processes that a process has started and not seen the end of."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def until_kept(demo: Process, out: Path) -> str:
    """Wait until the auto fleet is kept running; returns its frontend's URL."""
    until((out / "result.json").exists, "the result", 90.0)
    ready = [
        json.loads(line)
        for line in (out / "auto-1-frontend.log").read_text().splitlines()
        if line.startswith("{")
    ]
    assert demo.popen.poll() is None
    return str(ready[0]["url"])


def test_auto_reuses_more_and_the_result_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demo", "--quick", "--seeds", "2", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["is_good"]
    assert result["are_requests_identical"]
    assert list(result["modes"]) == ["round-robin", "kv", "auto"]
    columns = [one for mode in result["modes"].values() for one in mode["seeds"]]
    assert [one["seed"] for one in columns] == [1, 2] * 3
    for column in columns:
        assert (column["requests"], column["failures"]) == (18 * 3, 0)
        assert sum(column["requests_by_worker"].values()) == column["requests"]
        # Engines report the same to the client and to the frontend.
        assert column["delivered_tokens"] == column["reused_tokens"]
        assert column["computed_tokens"] + column["reused_tokens"] == column["prompt_tokens"]
        assert 0 < column["ttft_ms_p50"] <= column["ttft_ms_max"]
        assert column["ttft_ms_p99"] is None, "54 samples have no p99"
        assert column["prompt_tokens"] > 54 * 5_000
        if column["mode"] == "round-robin":
            assert column["busiest_ratio"] < 1.05
            assert column["selected_tokens"] is None
        else:
            assert 0 < column["selected_tokens"] <= column["available_tokens"]
    records = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(records) == 6 * 54
    cached = sum(r["cached_tokens"] for r in records if (r["mode"], r["seed"]) == ("auto", 2))
    assert cached == columns[-1]["reused_tokens"]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "demo.svg").read_text()
    table = (tmp_path / "table.md").read_text()
    for mode in result["modes"]:
        for seed in (1, 2):
            for part in ("mocker", "frontend"):
                assert (tmp_path / f"{mode}-{seed}-{part}.log").stat().st_size > 0
        reused = result["modes"][mode]["mean"]["prompt tokens reused (%)"]
        cell = f"{reused['mean']:.1f} ± {reused['off']:.1f}"
        assert f"| {mode} | {cell} |" in table
        assert cell in done.stdout
    for part in ("time to first token p50 (ms)", "mocks", "selected", "delivered"):
        assert part in done.stdout


def test_keep_leaves_the_auto_fleet_until_a_signal(
    run: Callable[..., Process], client: Callable[[str], Http], tmp_path: Path
) -> None:
    demo = run("demo", *TINY, "--keep", "--out", str(tmp_path), env=PATHS)
    http = client(until_kept(demo, tmp_path))
    workers = http.get("/workers")
    assert [worker["healthy"] for worker in workers] == [True] * 4
    assert sum(worker["blocks"] for worker in workers) > 0
    ask = {"model": "mock-model", "messages": [{"role": "user", "content": "Hello"}]}
    assert http.post("/explain", ask)["policy"] == "auto"
    assert http.post("/v1/chat/completions", ask)["usage"]["completion_tokens"] > 0
    started = children_of(demo.popen.pid)
    assert len(started) == 2
    demo.popen.send_signal(signal.SIGINT)
    assert demo.popen.wait(DEADLINE_S) == int(not result_of(tmp_path)["is_good"])
    assert all(is_gone(pid) for pid in started)


def test_an_engine_that_dies_ends_the_demo_and_is_named(
    run: Callable[..., Process], tmp_path: Path
) -> None:
    demo = run("demo", *TINY, "--keep", "--out", str(tmp_path), env=PATHS)
    until_kept(demo, tmp_path)
    engines, frontend = sorted(children_of(demo.popen.pid))
    os.kill(engines, signal.SIGKILL)
    assert demo.popen.wait(DEADLINE_S) == 1
    assert is_gone(frontend)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_leaves_nothing_behind(
    run: Callable[..., Process], tmp_path: Path, number: signal.Signals
) -> None:
    demo = run("demo", "--no-plot", "--out", str(tmp_path), env=PATHS)
    until(lambda: len(children_of(demo.popen.pid)) == 6, "the fleets of the first seed")
    started = children_of(demo.popen.pid)
    demo.popen.send_signal(number)
    assert demo.popen.wait(DEADLINE_S) == 130
    assert all(is_gone(pid) for pid in started)
    assert not (tmp_path / "result.json").exists()


def test_a_process_that_does_not_start_is_shown_with_its_log(tmp_path: Path) -> None:
    async def start() -> None:
        async with Children(tmp_path) as children:
            engine = await children.start("engine", "kvflash.mocker", "--block-size", "0")
            await engine.ready(1)

    with pytest.raises(ChildError, match=r"engine ended with status 2(.|\n)*--block-size must be"):
        asyncio.run(start())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "demo", "--out", str(tmp_path / "file")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert "--out" in done.stderr


def result_of(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "result.json").read_text()))
