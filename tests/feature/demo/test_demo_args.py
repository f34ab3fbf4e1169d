"""The demo's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo import __main__ as entry
from demo.args import parse_args
from demo.screen import examples


def test_defaults_and_quick() -> None:
    full, quick = parse_args([]), parse_args(["--quick"])
    assert (full.workers, full.block_size, full.cache_blocks) == (4, 16, 3_000)
    assert full.out == Path("demo-out")
    assert quick.conversations * quick.turns < full.conversations * full.turns
    assert quick.speedup_ratio > full.speedup_ratio
    assert (full.seeds, quick.seeds) == (3, 1)


def test_what_is_given_wins_over_quick() -> None:
    args = parse_args(["--quick", "--turns", "9", "--block-size", "64", "--keep", "--seed", "3"])
    assert (args.turns, args.cache_blocks, args.keep, args.seed) == (9, 750, True, 3)


@pytest.mark.parametrize("flags", [["--workers", "1"], ["--turns", "x"], ["--port", "1"]])
def test_wrong_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(flags)
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entry, "find_spec", lambda name: None if name == "matplotlib" else True)
    assert entry.main([]) == 2
    assert capsys.readouterr().err == (
        "python -m demo: error: matplotlib not installed; run: pip install matplotlib "
        "(or give --no-plot)\n"
    )
    monkeypatch.setattr(entry, "find_spec", lambda _: None)
    assert entry.main([]) == 2
    assert "rich and matplotlib not installed" in capsys.readouterr().err


def test_examples_are_lines_to_copy() -> None:
    lines = examples("http://127.0.0.1:1", "m").splitlines()
    assert len(lines) == 4
    assert all(line.startswith("curl -s") and "http://127.0.0.1:1/" in line for line in lines)
