"""Builds the replay harness, makes corpora, runs trials: for the gates and the peers' table."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
CACHE = Path.home() / ".cache" / "kvflash"

Rows = dict[str, dict[str, float]]


def build(crate: Path, binary: str) -> Path:
    """Builds `binary` of `crate` for release and returns where it is."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", CACHE / "target"))
    command = ["cargo", "build", "--release", "--locked", "--quiet", "--bin", binary]
    subprocess.run(command, cwd=crate, check=True, env=os.environ | {"CARGO_TARGET_DIR": target})
    return target / "release" / binary


class Harness:
    """A built harness and the corpora it replays."""

    def __init__(self, binary: Path):
        self.binary = binary

    def corpus(self, trace: str | None, **recipe: object) -> Path:
        """Makes the corpus of `recipe` anew, from `trace` or a generated one."""
        kind = "trace" if trace else "made"
        parts = [f"{name}-{value}" for name, value in recipe.items()]
        path = CACHE / "replay" / "_".join([kind, *parts, "corpus"])
        path.parent.mkdir(parents=True, exist_ok=True)
        options = [word for name, value in recipe.items() for word in (f"--{name}", str(value))]
        if trace:
            options += ["--trace", trace]
        subprocess.run(
            [self.binary, "corpus", "--out", path, *options], check=True, capture_output=True
        )
        return path

    def compare(
        self,
        backends: list[str],
        mode: str,
        corpus: Path | None = None,
        *,
        trials: int = 3,
        blocks: int = 10_000_000,
    ) -> Rows:
        """Runs trials in fresh processes that take turns; returns the medians per backend."""
        command = [self.binary, "compare", "--backends", ",".join(backends), "--modes", mode]
        command += ["--trials", str(trials), "--blocks", str(blocks)]
        command += ["--corpus", corpus] if corpus else []
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for line in run.stdout.splitlines():
            row = json.loads(line)
            assert row.pop("mode") == mode
            backend = row.pop("backend")
            for name, figure in row.items():
                figures[backend][name].append(figure)
        assert set(figures) == set(backends), "every backend answered"
        assert mode == "check" or all(figures.values()), "every backend was measured"
        return {
            backend: {name: statistics.median(values) for name, values in row.items()}
            for backend, row in figures.items()
        }
