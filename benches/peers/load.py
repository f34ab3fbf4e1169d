"""wrk runs and what they print."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True)
class Load:
    """One wrk run."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    failed: int


def chat_bodies(count: int = 64, characters: int = 4_500) -> list[str]:
    """Different prompts of one length that share their first 2,000 characters."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9)))
             for _ in range(2_000)]  # fmt: skip
    text = lambda size: " ".join(rng.choices(words, k=size // 2))[:size]  # noqa: E731
    shared = text(2_000)
    return [
        json.dumps({"model": "tiny-llama", "max_tokens": 1, "messages": [
            {"role": "system", "content": shared},
            {"role": "user", "content": text(characters - 2_000)}]})
        for _ in range(count)
    ]  # fmt: skip


def script(path: Path, bodies: list[str]) -> Path:
    """A wrk script that posts the bodies in turn."""
    quoted = ",\n".join(f"[==[{body}]==]" for body in bodies)
    path.write_text(
        'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n'
        f"local bodies = {{\n{quoted}}}\nlocal requests, at = {{}}, 0\n"
        "init = function() for i, body in ipairs(bodies) do\n"
        "  requests[i] = wrk.format(nil, nil, nil, body) end end\n"
        "request = function() at = at % #requests + 1 return requests[at] end\n"
    )
    return path


def wait(url: str, deadline_s: float = 60) -> None:
    """Wait until a service answers at all."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"{url} did not answer within {deadline_s:g} s")


def wrk(url: str, lua: Path, *, connections: int = 32, seconds: int = 8) -> Load:
    """Run wrk with one thread."""
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed (Debian: apt-get install wrk)")
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(lua), url]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def percentile(name: str) -> float:
        found = re.search(rf"^\s*{name}%\s+([\d.]+)(us|ms|s)\s*$", text, re.MULTILINE)
        assert found, text
        return float(found[1]) * _UNITS[found[2]]

    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    assert rate, text
    return Load(float(rate[1]), percentile("50"), percentile("99"), int(failed[1]) if failed else 0)
