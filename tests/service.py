"""Real processes for tests: started on free ports, awaited by their ready line, ended in finally."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

VECTORS = Path(__file__).parent / "vectors"
DEADLINE_S = 30.0


def until(check: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Ask until the answer is true; fails with what was waited for and the last answer."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while True:
        answer = check()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s:g} s for {what}; last answer: {answer!r}")
        pause.wait(0.01)


class Http:
    """A JSON client over one kept connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            kind = {} if body is None else {"content-type": "application/json"}
            self._connection.request(method, path, data, {**kind, **(headers or {})})
            response = self._connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise
        kind = response.headers.get("content-type", "")
        parsed = json.loads(text) if kind.startswith("application/json") and text else text
        return response.status, parsed, {k.lower(): v for k, v in response.headers.items()}

    def get(self, path: str) -> Any:
        status, body, _ = self.call("GET", path)
        assert status == 200, (path, status, body)
        return body

    def post(self, path: str, body: Any, expect: int = 200) -> Any:
        status, answer, _ = self.call("POST", path, body)
        assert status == expect, (path, status, answer)
        return answer

    def close(self) -> None:
        self._connection.close()


class Process:
    """``python -m MODULE ARGS``, its stdout read line by line."""

    def __init__(self, module: str, *args: str, env: dict[str, str] | None = None) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_output(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self.popen.stderr is not None
        self.errors.extend(self.popen.stderr)

    def ready(self) -> dict[str, Any]:
        """The next ready line."""
        end = time.monotonic() + DEADLINE_S
        while True:
            line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            if line is None:
                raise AssertionError("the process ended early: " + "".join(self.errors))
            if line.startswith("{") and json.loads(line).get("event") == "ready":
                return dict(json.loads(line))

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def terminate(self, deadline_s: float = DEADLINE_S) -> int:
        """SIGTERM, and the exit status."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(deadline_s)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()
