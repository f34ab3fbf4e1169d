"""The programs of examples/, each run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support_stage import TINY_LLAMA, Stage

from service import until

EXAMPLES = Path(__file__).parents[2] / "examples"
BACKEND = "dynamo.backend.generate"


def program(name: str) -> str:
    return (EXAMPLES / name).read_text()


def test_each_is_run_here_and_in_the_list() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    tested, listed = Path(__file__).read_text(), (EXAMPLES / "README.md").read_text()
    assert len(names) == 6
    assert [name for name in names if f'"{name}"' not in tested or name not in listed] == []


@pytest.mark.parametrize(
    "name", ["minimise_ttft.py", "hierarchical_probing.py", "manual_lifecycle.py"]
)
def test_one_without_workers_says_how_to_start_some(stage: Stage, name: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], env={**os.environ, **stage.env},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "no instance of dynamo/" in ran.stderr
    assert "kvflash mocker --endpoint dynamo." in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("name", "status"), [("policy_of_your_own.py", 0), ("disaggregated_pair.py", 1)]
)
def test_one_that_needs_more_says_what(stage: Stage, name: str, status: int) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], env={**os.environ, **stage.env},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == status
    assert "kvflash frontend" in ran.stdout + ran.stderr


def test_the_second_prompt_goes_where_the_first_is_cached(stage: Stage) -> None:
    stage.mocker(BACKEND, model="mock-model")
    ran = stage.script(program("minimise_ttft.py"))
    found = re.findall(r"worker (\d+) had (\d+) tokens to prefill and generated 20\n", ran.output)
    (first, all_tokens), (again, rest) = found
    assert first == again and int(all_tokens) == 99
    # 3 tokens are behind the last full block; a prediction, before the events come, has them too.
    assert int(rest) in (0, 3)


def test_the_group_that_holds_the_prompt_gets_it(stage: Stage) -> None:
    for group in ("east", "west"):
        stage.mocker(f"dynamo.{group}.generate", model="mock-model", workers=1)
    ran = stage.script(program("hierarchical_probing.py"))
    assert ran.output.splitlines() == [
        "warming west with 4 tokens",
        "west holds 6 blocks and got 4 tokens",
    ]


def test_load_is_booked_and_freed_by_hand(stage: Stage) -> None:
    stage.mocker(BACKEND, model="mock-model")
    booked, prefilled, freed = stage.script(program("manual_lifecycle.py")).output.splitlines()
    assert "'requests': 1" in booked and "'prefill_tokens': 99" in booked
    assert "'requests': 1" in prefilled and "'prefill_tokens': 0" in prefilled
    assert freed.startswith("freed after 20 tokens") and "'requests': 0" in freed


def test_a_worker_of_ones_own_is_found_and_its_cache_known(stage: Stage) -> None:
    http = stage.frontend("--tokenizer", str(TINY_LLAMA))
    for number in range(2):
        stage.serve(program("worker_with_events.py"), f"worker_{number}")
    stage.wait_workers(2)
    body = {"model": "parrot", "prompt": "once upon a time " * 40, "max_tokens": 5}

    def answer(held: int) -> tuple[str, int]:
        status, one, headers = http.call("POST", "/v1/completions", body)
        assert status == 200 and one["usage"]["completion_tokens"] == 5, one
        assert (one["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == bool(held)
        return headers["x-kvflash-worker"], int(headers["x-kvflash-overlap-blocks"])

    def overlaps() -> list[int]:
        return sorted(one["device_blocks"] for one in http.post("/explain", body)["candidates"])

    assert overlaps() == [0, 0]
    first, _ = answer(0)
    until(lambda: overlaps()[1] > 0, "the worker's events")
    again, overlap = answer(overlaps()[1])
    assert again == first and overlap > 0

    def active() -> list[int]:
        workers = http.get("/workers")
        return [one["active_decode_blocks"] for w in workers for one in w["loads"].values()]

    # Cached blocks are no load: counting them would shut the worker off at a threshold.
    until(lambda: active() == [0, 0], "the end of its load")


def test_a_pair_shares_a_request(stage: Stage) -> None:
    http = stage.frontend("--tokenizer", str(TINY_LLAMA))
    text = program("disaggregated_pair.py")
    stage.serve(text, "pair_prefill", "prefill")
    stage.serve(text, "pair_decode", "decode")
    stage.wait_workers(2)
    body = {"model": "pair", "prompt": "once upon a time", "max_tokens": 5}
    status, answer, headers = http.call("POST", "/v1/completions", body)
    assert status == 200 and answer["usage"]["completion_tokens"] == 5, answer
    prefiller = headers["x-kvflash-prefill-worker"]
    assert prefiller and prefiller != headers["x-kvflash-worker"]


def test_a_user_stays_with_a_worker(stage: Stage) -> None:
    stage.env["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES), stage.env["PYTHONPATH"]])
    assert (EXAMPLES / "policy_of_your_own.py").exists()
    stage.mocker(BACKEND, model="mock-model")
    policy = "python:policy_of_your_own:Homes"
    http = stage.frontend("--tokenizer", str(TINY_LLAMA), "--router-mode", policy)
    stage.wait_workers(2)
    homes: dict[str, set[str]] = {}
    for n in range(12):
        user = f"user-{n % 3}"
        body = {"model": "mock-model", "prompt": f"{n} " * 40, "max_tokens": 2, "user": user}
        status, _, headers = http.call("POST", "/v1/completions", body)
        assert status == 200
        homes.setdefault(user, set()).add(headers["x-kvflash-worker"])
    assert [len(workers) for workers in homes.values()] == [1, 1, 1]
