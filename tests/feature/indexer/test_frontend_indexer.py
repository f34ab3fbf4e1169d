"""A frontend that serves the indexer's questions, and one that asks an indexer."""

from __future__ import annotations

from pathlib import Path

import pytest

from service import Process, until
from support_frontend import COMPLETIONS, FrontendProcess, Mocker, ask


def test_one_frontend_knows_what_the_other_one_serves() -> None:
    """The first follows the events and serves the index; the second asks it, and decides alike."""
    mockers = [Mocker(), Mocker()]
    known: tuple[str, ...] = ()
    for number, mocker in enumerate(mockers, 1):
        known += ("--worker", mocker.spec(id=number))
    deadline = ("--remote-indexer-deadline", "30")
    try:
        with FrontendProcess(*known, "--serve-indexer") as first:
            remote = ("--use-remote-indexer", first.url, *deadline)
            with FrontendProcess(*known, *remote, "--router-predicted-ttl-secs", "0") as second:
                first.wait_healthy(1, 2)
                second.wait_healthy(1, 2)
                assert second.workers()[1]["listeners"] == []
                prompt = {"model": "m", "prompt": list(range(160)), "max_tokens": 1}
                served = ask(first.url, COMPLETIONS, prompt).headers["x-kvflash-worker"]
                question = {"model_name": "m", "token_ids": list(range(160))}
                instance = served.split(":", maxsplit=1)[0]

                def is_held() -> bool:
                    scores = first.http.post("/query", question)["scores"]
                    return bool(scores[instance]["0"] == 160)

                until(is_held, "the stored blocks")
                for _ in range(4):
                    answer = ask(second.url, COMPLETIONS, prompt)
                    assert answer.headers["x-kvflash-worker"] == served
                    # The last token is always computed.
                    assert answer.headers["x-kvflash-overlap-blocks"] == "9"
                lookups = 'kvflash_remote_indexer_lookups_total{outcome="answered"}'
                assert second.metrics()[lookups] == 4
                assert second.http.call("GET", "/digest")[0] == 404
                # Without the indexer requests are served all the same.
                first.process.kill()
                assert ask(second.url, COMPLETIONS, prompt).status == 200
                failed = 'kvflash_remote_indexer_lookups_total{outcome="failed"}'
                assert second.metrics()[failed] == 1
    finally:
        for mocker in mockers:
            mocker.close()


def test_both_at_once_make_no_sense() -> None:
    process = Process(
        *("kvflash.frontend", "--port", "0", "--serve-indexer"),
        *("--use-remote-indexer", "http://127.0.0.1:1"),
    )
    try:
        assert process.popen.wait(30) == 2
    finally:
        process.close()
    assert "--serve-indexer and --use-remote-indexer exclude each other" in "".join(process.errors)


INDEXER = ("kvflash.indexer", "--block-size", "16", "--model-name", "m")
FRONTEND = ("kvflash.frontend", "--serve-indexer")


@pytest.mark.parametrize("service", [INDEXER, FRONTEND], ids=["indexer", "frontend"])
def test_an_indexer_is_found_in_discovery(tmp_path: Path, service: tuple[str, ...]) -> None:
    """It follows the same workers by the same flags, and is used without being named."""
    env = {"KVFLASH_DISCOVERY_DIR": str(tmp_path)}
    mocker = Mocker()
    worker = ("--worker", mocker.spec(id=1), "--discovery", "file")
    indexer = Process(*service, "--port", "0", "--host", "127.0.0.1", *worker, env=env)
    remote = ("--use-remote-indexer", "--remote-indexer-deadline", "30")
    try:
        indexer.ready()
        flags = (*worker, *remote, "--router-predicted-ttl-secs", "0")
        with FrontendProcess(*flags, env=env) as frontend:
            frontend.wait_healthy(1)
            prompt = {"model": "m", "prompt": list(range(160)), "max_tokens": 1}

            def is_known() -> bool:
                answer = ask(frontend.url, COMPLETIONS, prompt)
                return answer.headers["x-kvflash-overlap-blocks"] == "9"

            until(is_known, "the indexer to be found, and to know the prompt")
            assert frontend.workers()[1]["listeners"] == []
    finally:
        indexer.close()
        mocker.close()


def test_an_indexer_is_found_nowhere_without_discovery() -> None:
    process = Process(
        *("kvflash.frontend", "--port", "0", "--use-remote-indexer", "--worker", "http://h:1")
    )
    try:
        assert process.popen.wait(30) == 2
    finally:
        process.close()
    assert "without a URL finds the indexer in discovery" in "".join(process.errors)
