"""Services with a file of keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvflash.explain import main as explain
from kvflash.workers import main as workers
from service import until
from support_frontend import CHAT, Frontend


def _line(key_id: str, role: str) -> str:
    digest = hashlib.sha256(b"\0" * 16 + key_id.encode()).hexdigest()
    return f"{key_id}:sha256${'00' * 16}${digest}:{role}\n"


def test_keys_close_a_frontend_and_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(_line("bob", "client"))
    with Frontend("--keys-file", str(path)) as frontend:

        def status(method: str, where: str, key: str | None, body: object = None) -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return int(frontend.http.call(method, where, body, headers=headers)[0])

        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        assert status("POST", CHAT, None, body) == 401
        assert status("POST", CHAT, "eve", body) == 401
        # There is no worker yet.
        assert status("POST", CHAT, "bob", body) == 503
        assert status("GET", "/metrics", None) == 200
        path.write_text(_line("bob", "client") + _line("eve", "metrics") + _line("ann", "admin"))
        until(lambda: status("GET", "/metrics", None) == 401, "the new file to be read")
        assert status("GET", "/metrics", "eve") == 200
        assert status("GET", "/workers", None) == 401
        assert status("GET", "/workers", "bob") == 403
        assert status("GET", "/workers", "ann") == 200
        # An unusable file changes nothing.
        path.write_text("ann")
        until(
            lambda: (
                b'keys_renewals_total{outcome="refused"} 1'
                in frontend.http.call("GET", "/metrics", headers={"x-api-key": "eve"})[1]
            ),
            "the bad file to be noticed",
        )
        assert status("GET", "/workers", "ann") == 200
        assert status("GET", "/live", None) == 200
        _, told, _ = frontend.http.call("GET", "/health", headers={"x-api-key": "eve"})
        (warning,) = told["warnings"]
        assert warning.startswith(f"{path}: the changed file cannot be used")


def test_workers_are_listed_and_drained_with_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, key = tmp_path / "keys", tmp_path / "key"
    keys.write_text(_line("ann", "admin"))
    key.write_text("ann\n")
    shown = ("--service-key-file", str(key))
    with Frontend("--keys-file", str(keys), "--worker", "http://127.0.0.1:9,id=3") as frontend:
        for words in (["list"], ["drain"], ["resume"]):
            ids = ["3"] if words != ["list"] else []
            assert workers([*words, frontend.url, *ids]) == 1
            assert "401" in capsys.readouterr().err
        assert workers(["list", frontend.url, *shown]) == 0
        capsys.readouterr()
        assert workers(["drain", frontend.url, "3", "--wait", "60", *shown]) == 0
        assert capsys.readouterr().out == "worker 3: draining, 0 requests in flight\n"
        assert workers(["resume", frontend.url, "3", *shown]) == 0


@pytest.mark.parametrize("shown", ["bob", "eve"])
def test_a_refused_explanation_names_the_role_that_it_needs(
    tmp_path: Path, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the key may not ask which model is served."""
    keys, key = tmp_path / "keys", tmp_path / "key"
    keys.write_text(_line("ann", "admin") + _line("bob", "metrics") + _line("joe", "client"))
    key.write_text(shown)
    with Frontend("--keys-file", str(keys)) as frontend:
        argv = [frontend.url, "--prompt", "hi", "--service-key-file", str(key)]
        assert explain(argv) == 1
    told = capsys.readouterr().err
    assert f"POST {frontend.url}/explain: " in told
    assert "admin" in told and "client" not in told
