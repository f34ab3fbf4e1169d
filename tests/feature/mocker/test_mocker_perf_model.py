"""Modelled times: the recorded curves, and what the batch adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvflash.mocker.engine import (
    BATCH_COST,
    DECODE_MS_MIN,
    decode_ms,
    decode_step_ms,
    pass_ms,
    prefill_ms,
)

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "mocker_cases.json").read_text())


@pytest.mark.parametrize("case", CASES["perf"], ids=lambda case: case["id"])
def test_recorded_case(case: dict[str, Any]) -> None:
    given, expected = case["input"], case["expected"]
    if "new_tokens_in_batch" in given:
        got = prefill_ms(given["new_tokens_in_batch"])
        assert got == pytest.approx(expected["prefill_ms"], rel=1e-9)
    else:
        got = decode_ms(given["active_kv_tokens_over_capacity"])
        assert got == pytest.approx(expected["decode_ms"], rel=1e-9)


def test_there_are_recorded_cases_of_both_kinds() -> None:
    kinds = {key for case in CASES["perf"] for key in case["expected"]}
    assert (len(CASES["perf"]), kinds) == (8, {"prefill_ms", "decode_ms"})


def test_decode_step_grows_with_its_batch() -> None:
    assert decode_step_ms(0.5, 0) == 0.0
    assert decode_step_ms(0.5, 1) == decode_ms(0.5)
    steps = [decode_step_ms(0.5, batch) for batch in range(1, 257)]
    assert steps == sorted(set(steps))
    assert steps[255] == pytest.approx(decode_ms(0.5) * (1 + BATCH_COST * 255))
    # Batching still pays: a token of a full batch costs less than one alone.
    assert steps[255] / 256 < steps[0] / 100


def test_pass_is_prefill_plus_decode_step() -> None:
    assert pass_ms(0, 0, 0.3) == 0.0
    assert pass_ms(100, 0, 0.3) == prefill_ms(100)
    assert pass_ms(100, 4, 0.3) == prefill_ms(100) + decode_step_ms(0.3, 4)
    assert decode_ms(-1.0) == DECODE_MS_MIN
