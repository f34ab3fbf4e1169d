"""Peers in environments of their own, made on first use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HOME = Path(os.environ.get("KVFLASH_PEERS", "~/.cache/kvflash/peers")).expanduser()

#: name -> pip arguments, one call each. Dynamo's own dependencies include packages that are not on
#: PyPI; its frontend, mocker and indexer run without them.
PACKAGES = {
    "vllm-router": [["vllm-router==0.1.17"]],
    "sglang-router": [["sglang-router==0.3.2"]],
    "smg": [["smg==1.13.0"]],
    "dynamo": [
        ["ai-dynamo-runtime==1.6.1"],
        ["--no-deps", "ai-dynamo==1.6.1"],
        ["packaging", "pyyaml", "aiohttp>=3.14.3,<4", "certifi", "kubernetes>=32.0.1,<33",
         "msgspec>=0.19", "prometheus-client>=0.23.1,<1", "pyzmq>=26", "redis>=6.2,<9", "tqdm",
         "transformers>=4.56", "zstandard>=0.23,<1"],
    ],
}  # fmt: skip


def environment(name: str) -> Path:
    """The ``bin`` folder of a peer's environment; installs it when it is not there."""
    folder = HOME / name
    done = folder / ".installed"
    if not done.exists():
        print(f"installing {name} into {folder} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for arguments in PACKAGES[name]:
            command = [str(folder / "bin" / "pip"), "install", "--quiet", *arguments]
            subprocess.run(command, check=True)
        done.touch()
    return folder / "bin"
