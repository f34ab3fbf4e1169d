"""The `openai` package of npm, of the release in npm/package-lock.json; needs node and npm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from support_frontend import Frontend

HERE = Path(__file__).parent / "npm"


def test_the_openai_package(frontend: Frontend, modules: Path) -> None:
    done = subprocess.run(
        ["node", str(HERE / "openai.mjs"), frontend.url + "/v1", str(modules)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 10
