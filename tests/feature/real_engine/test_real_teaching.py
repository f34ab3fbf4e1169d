"""A real vLLM without /tokenize teaches by its answers: opt-in, see support_engines.py."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from service import until
from support_engines import BLOCK_SIZE, MODEL, conversations, needs_engines, vllm_engines

pytestmark = needs_engines


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with vllm_engines(tmp_path_factory.mktemp("engines"), 1) as (started,):
        yield started


@contextlib.contextmanager
def without_tokenizing(url: str) -> Iterator[str]:
    """The engine at `url` as one that has neither /tokenize nor /render."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, answer = 404, b"{}"
            if not self.path.endswith(("/tokenize", "/render")):
                request = urllib.request.Request(
                    url + self.path, body or None, {"content-type": "application/json"}
                )
                try:
                    with urllib.request.urlopen(request) as response:
                        status, answer = response.status, response.read()
                except urllib.error.HTTPError as error:
                    status, answer = error.code, error.read()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_what_an_answer_teaches_is_what_the_engine_reuses(engine, run, client):
    engine.clear()
    with without_tokenizing(engine.url) as url:
        process = run(
            "kvflash.frontend", "--port", "0", "--host", "127.0.0.1", "--router-mode", "kv",
            "--seed", "1", "--worker", engine.worker(url),
        )  # fmt: skip
        frontend = client(process.ready()["url"])
        until(lambda: frontend.call("GET", "/ready")[0] == 200, "the engine to be known", 60)
        turns: dict[int, int] = {}
        rows = []
        for number, talk, question in conversations(13, count=4):
            talk.append({"role": "user", "content": question})
            turns[number] = turn = turns.get(number, 0) + 1
            body = {"model": MODEL, "messages": talk, "max_tokens": 12, "temperature": 0}
            status, answer, headers = frontend.call("POST", "/v1/chat/completions", body)
            assert status == 200, answer
            assert answer.get("prompt_token_ids") is None, "the client did not ask for them"
            usage = answer["usage"]
            reused = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            predicted = int(headers["x-kvflash-overlap-blocks"]) * BLOCK_SIZE
            rows.append((turn, usage["prompt_tokens"], predicted, reused))
            text = answer["choices"][0]["message"]["content"]
            talk.append({"role": "assistant", "content": text})
        print(json.dumps(rows))
        assert process.terminate() == 0
    later = [row for row in rows if row[0] > 1]
    assert all(predicted <= reused for _, _, predicted, reused in rows), rows
    # What the last answer added, and the new message, are not promised.
    lost = [reused - predicted for _, _, predicted, reused in later]
    assert later and max(lost) <= 2 * BLOCK_SIZE, rows
