"""The `openai` package of npm, of the release in npm/package-lock.json; needs node and npm."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support_frontend import Frontend

HERE = Path(__file__).parent / "npm"
CACHE = Path.home() / ".cache/kvflash"
INSTALL_S_MAX = 110


@pytest.fixture(scope="module")
def modules() -> Path:
    """A folder with the package in its node_modules, installed once for a lock file."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: install Node.js 20 or newer for this test")
    lock = (HERE / "package-lock.json").read_bytes()
    folder = CACHE / f"npm-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not (folder / "installed").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, folder)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S_MAX, check=False
        )
        if done.returncode:
            message = f"npm ci failed: {done.stderr[-500:]}"
            assert os.environ.get("CI") != "true", message
            pytest.skip(message)
        (folder / "installed").touch()
    return folder


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
