"""One frontend over two mockers for the clients of each file, and what npm installs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support_apis import two_mockers
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


@pytest.fixture(scope="module")
def node(modules: Path) -> Callable[..., list[str]]:
    """Runs a script of npm/ with a base URL and more arguments: the names of its checks."""

    def run(script: str, url: str, *arguments: str) -> list[str]:
        command = ["node", str(HERE / script), url, str(modules), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout))

    return run


@pytest.fixture(scope="module")
def frontend() -> Iterator[Frontend]:
    with two_mockers() as frontend:
        yield frontend
        frontend.wait_idle()
