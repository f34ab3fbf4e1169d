"""Requests that are wrong, on every path that is served: each API refuses in its own form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from support_apis import two_mockers
from support_frontend import Frontend, Raw

# The longest body that is taken; prompts are refused before that, where their tokens are counted.
BODY_BYTES_MAX = 300_000
LONG = "x" * 280_000
USER = [{"role": "user", "content": "hi"}]
MULTIPART = {"content-type": "multipart/form-data; boundary=b"}

# For each path: a valid request, its prompt's field, and invalid values.
FORMS: dict[str, tuple[dict[str, Any], str, list[Any]]] = {
    "/v1/chat/completions": ({"messages": USER}, "messages", [5, [], [1], [{"role": 1}], None]),
    "/v1/completions": ({"prompt": "a"}, "prompt", [5, {}, [1.5], [-1], None]),
    "/v1/responses": ({"input": "a"}, "input", [5, {}, [], [1], None]),
    "/v1/messages": ({"messages": USER, "max_tokens": 9}, "messages", [5, [], [1], None]),
    "/v1/messages/count_tokens": ({"messages": USER}, "messages", [5, [], [1], None]),
    "/inference/v1/generate": ({"token_ids": [1]}, "token_ids", [5, "a", [-1], [], None]),
    "/generate": ({"text": "a"}, "text", [5, {}, None]),
    "/v1/embeddings": ({"input": "a"}, "input", [5, {}, [], [1.5], None]),
    **{
        path: ({"query": "q", "documents": ["a"]}, "documents", [5, [], [1], None])
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    },
    **{
        path: ({"text_1": "q", "text_2": ["a"]}, "text_2", [5, [], [1], None])
        for path in ("/v1/score", "/score")
    },
    "/classify": ({"input": "a"}, "input", [5, {}, [], None]),
    "/pooling": ({"input": "a"}, "input", [5, {}, [], None]),
    "/v1/audio/speech": ({"input": "a", "voice": "v"}, "input", [5, {}, [], None]),
    "/v1/audio/transcriptions": ({}, "file", []),
    "/v1/audio/translations": ({}, "file", []),
    "/tokenize": ({"prompt": "a"}, "prompt", [5, {}, [-1], None]),
    "/detokenize": ({"tokens": [97]}, "tokens", [5, "a", [-1], None]),
}
GENERATING = [
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/inference/v1/generate", "/generate"),
]
SOUND = [path for path in FORMS if "/audio/trans" in path]
NAMED = ["/v1/responses/{id}", "/v1/responses/{id}/cancel"]


@pytest.fixture(scope="module")
def frontend() -> Iterator[Frontend]:
    limits = ("--max-body-bytes", str(BODY_BYTES_MAX), "--max-upload-bytes", str(BODY_BYTES_MAX))
    with two_mockers(*limits) as frontend:
        yield frontend


def upload(model: str = "m", *, file: str = "0000") -> bytes:
    """An upload of sound; an empty file is left out."""
    parts = f'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n'
    if file:
        parts += (
            '--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
            f"Content-Type: audio/wav\r\n\r\n{file}\r\n"
        )
    return (parts + "--b--\r\n").encode()


def request_of(path: str, model: str = "m") -> tuple[bytes, dict[str, str]]:
    """A request that is right, for this model."""
    if path in SOUND:
        return upload(model), MULTIPART
    return json.dumps({"model": model, **FORMS[path][0]}).encode(), {}


def refusal(
    frontend: Frontend, path: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer that must be in the form of the path's API."""
    status, answer, told = frontend.http.call("POST", path, body, headers)
    assert told["content-type"].startswith("application/json"), (path, status, answer)
    return status, error_of(path, status, answer)


def error_of(path: str, status: int, answer: Any) -> dict[str, Any]:
    assert isinstance(answer, dict) and isinstance(answer["error"], dict), (path, answer)
    error = answer["error"]
    assert isinstance(error["message"], str) and error["message"], (path, answer)
    if path.startswith("/v1/messages"):
        assert answer["type"] == "error" and set(error) == {"type", "message"}, (path, answer)
        assert error["type"].endswith("_error") or error["type"] == "request_too_large"
    else:
        assert set(answer) == {"error"}, (path, answer)
        assert set(error) == {"message", "type", "param", "code"}, (path, answer)
        assert error["code"] == status, (path, answer)
    return dict(error)


def test_every_path_that_is_served_is_tried(frontend: Frontend) -> None:
    status, answer, _ = frontend.http.call("POST", "/nowhere", {})
    assert status == 404
    _, _, told = answer["error"]["message"].partition("the APIs served are ")
    assert set(told.split(", ")) == {*FORMS, *NAMED, "/v1/models"}


@pytest.mark.parametrize("path", FORMS)
def test_what_is_right_is_answered(frontend: Frontend, path: str) -> None:
    body, headers = request_of(path)
    status, answer, _ = frontend.http.call("POST", path, body, headers)
    assert status == 200, answer


@pytest.mark.parametrize("path", FORMS)
def test_unknown_models(frontend: Frontend, path: str) -> None:
    status, error = refusal(frontend, path, *request_of(path, "nobody"))
    assert (status, "nobody" in error["message"]) == (404, True), error
    if path in SOUND:
        return
    for model in (5, ["m"], {"m": 1}):
        status, error = refusal(frontend, path, {**FORMS[path][0], "model": model})
        assert status == 400 and "model" in error["message"], error


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b"\xff", b'{"model":"m"', b"[" * 9_999]
)
def test_broken_json(frontend: Frontend, path: str, body: bytes) -> None:
    if path in SOUND:
        for kind in ("application/json", MULTIPART["content-type"], "multipart/form-data"):
            assert refusal(frontend, path, body, {"content-type": kind})[0] == 400
        return
    status, error = refusal(frontend, path, body)
    assert status == 400, error


@pytest.mark.parametrize("path", FORMS)
def test_wrong_types(frontend: Frontend, path: str) -> None:
    right, field, wrongs = FORMS[path]
    for wrong in wrongs:
        status, error = refusal(frontend, path, {"model": "m", **right, field: wrong})
        assert status == 400, (wrong, error)
    if path in SOUND:
        status, error = refusal(frontend, path, upload(file=""), MULTIPART)
        assert (status, "file" in error["message"]) == (400, True), error


@pytest.mark.parametrize("path", GENERATING)
def test_wrong_options(frontend: Frontend, path: str) -> None:
    right = {"model": "m", **FORMS[path][0]}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    wrongs: list[dict[str, Any]] = [{limit: "x"}, {limit: 0}, {limit: -1}, {limit: 1.5}]
    if "generate" in path:
        limit = "max_new_tokens" if path == "/generate" else "max_tokens"
        wrongs = [{"sampling_params": {limit: wrong[next(iter(wrong))]}} for wrong in wrongs]
        wrongs.append({"sampling_params": 5})
    for wrong in [*wrongs, {"stream": "yes"}, {"stream": 1}]:
        status, error = refusal(frontend, path, {**right, **wrong})
        assert status == 400, (wrong, error)


@pytest.mark.parametrize("path", GENERATING)
def test_prompts_that_no_worker_holds(frontend: Frontend, path: str) -> None:
    # The mockers hold 16,384 blocks of 16 bytes.
    prompts: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}], "token_ids": None}
    right, field, _ = FORMS[path]
    prompt = prompts.get(field, LONG)
    if field == "token_ids":
        prompt = [1] * 90_000  # About what a body of this size holds.
        right = {**right, "sampling_params": {"max_tokens": 200_000}}
    status, error = refusal(frontend, path, {"model": "m", **right, field: prompt})
    assert status == 400, error
    assert re.search(r"\d{5}", error["message"]), error


@pytest.mark.parametrize("path", FORMS)
def test_wrong_paths(frontend: Frontend, path: str) -> None:
    body, headers = request_of(path)
    bare = path.removeprefix("/v1")
    for wrong in (f"/v1{path}", f"{path}/", f"{path}/x", bare):
        # A response may be called x.
        if wrong in {*FORMS, "/v1/responses/x"}:
            continue
        status, answer, _ = frontend.http.call("POST", wrong, body, headers)
        # Of the API that was meant, where that can be told.
        is_message = path.startswith("/v1/messages") and not wrong.startswith("/messages")
        error = error_of(path if "type" in answer or is_message else "", status, answer)
        assert status == 404 and wrong in error["message"], error


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_wrong_methods(frontend: Frontend, path: str, method: str) -> None:
    status, answer, headers = frontend.http.call(method, path)
    error_of(path, status, answer)
    assert (status, headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_huge_bodies(frontend: Frontend, path: str, is_chunked: bool) -> None:
    kind = MULTIPART["content-type"] if path in SOUND else "application/json"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\n"
    length = BODY_BYTES_MAX + 1
    with Raw(frontend.address) as raw:
        if is_chunked:
            raw.send(f"{head}Transfer-Encoding: chunked\r\n\r\n{length:x}\r\n".encode())
            raw.send(b" " * length)
        else:
            # A body is refused by its announced length, before it arrives.
            raw.send(f"{head}Content-Length: {length}\r\n\r\n".encode())
        status, _, body = raw.read_answer()
    error = error_of(path, status, json.loads(body))
    assert status == 413 and str(BODY_BYTES_MAX) in error["message"], error


def test_nothing_is_left_behind(frontend: Frontend) -> None:
    metrics = frontend.metrics()
    failed = [name for name in metrics if re.search(r'requests_total.*status="5', name)]
    assert not failed
    assert metrics.get("kvflash_panics_total", 0) == 0
    frontend.wait_idle()
    workers = frontend.workers().values()
    assert all(worker["healthy"] for worker in workers)
    for path in FORMS:
        body, headers = request_of(path)
        assert frontend.http.call("POST", path, body, headers)[0] == 200, path
