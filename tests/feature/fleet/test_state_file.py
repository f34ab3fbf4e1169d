"""Registrations made over HTTP, after the process is another one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from service import Http, until

ENDPOINT = "tcp://127.0.0.1:1"


def start(run, service: str, path: Path):
    flags = ("--port", "0", "--host", "127.0.0.1", "--state-file", str(path))
    process = run(f"kvflash.{service}", *flags)
    return process, process.ready()["url"]


def add_engine(http: Http, at: int) -> int:
    body = {"url": f"http://127.0.0.1:{at}", "dp_size": 2}
    return int(http.post("/workers", body, expect=201)["id"])


def add_worker(http: Http, at: int) -> int:
    body = {"worker_id": at, "model_name": "m", "events": {"0": {"endpoint": ENDPOINT}}}
    return int(http.post("/workers", body, expect=201)["worker_id"])


def register(http: Http, at: int) -> int:
    body = {"instance_id": at, "endpoint": ENDPOINT, "model_name": "m", "block_size": 16}
    http.post("/register", body, expect=201)
    return at


def remove(http: Http, number: int) -> None:
    assert http.call("DELETE", f"/workers/{number}")[0] == 200


def unregister(http: Http, number: int) -> None:
    http.post("/unregister", {"instance_id": number, "model_name": "m"})


#: Routes that add and remove a worker, and the name of its number.
CALLS = {
    "frontend": (add_engine, remove, "id"),
    "router": (add_worker, remove, "worker_id"),
    "indexer": (register, unregister, "instance_id"),
}


@pytest.mark.parametrize("service", CALLS)
def test_what_was_registered_is_there_after_a_restart(run, tmp_path, service):
    add, forget, number = CALLS[service]
    path = tmp_path / "state.jsonl"

    def known(http: Http) -> set[int]:
        return {worker[number] for worker in http.get("/workers")}

    process, url = start(run, service, path)
    with closing(Http(url)) as http:
        kept = [add(http, at) for at in (11, 12, 13)]
        forget(http, kept[1])
        assert known(http) == {kept[0], kept[2]}
    # Whatever ends it.
    process.popen.kill()
    process.popen.wait()
    process, url = start(run, service, path)
    with closing(Http(url)) as http:
        until(lambda: known(http) == {kept[0], kept[2]}, "what was registered")
        forget(http, kept[0])
    process.popen.kill()
    process.popen.wait()
    _, url = start(run, service, path)
    with closing(Http(url)) as http:
        assert known(http) == {kept[2]}


def test_an_instance_of_two_tenants_is_there_twice(run, tmp_path):
    path = tmp_path / "state.jsonl"

    def restart() -> Http:
        return Http(start(run, "indexer", path)[1])

    def known(http: Http) -> list[str]:
        return [worker["tenant_id"] for worker in http.get("/workers")]

    body = {"instance_id": 1, "endpoint": ENDPOINT, "model_name": "m", "block_size": 16}
    with closing(restart()) as http:
        for tenant in ("a", "b"):
            http.post("/register", {**body, "tenant_id": tenant}, expect=201)
    with closing(restart()) as http:
        assert known(http) == ["a", "b"]
        unregister = {"instance_id": 1, "model_name": "m", "tenant_id": "a"}
        http.post("/unregister", unregister)
    with closing(restart()) as http:
        assert known(http) == ["b"]


def test_a_file_of_something_else_is_refused(run, tmp_path):
    path = tmp_path / "kvflash.toml"
    path.write_text("[server]\n")
    process = run("kvflash.indexer", "--port", "0", "--state-file", str(path))
    assert process.popen.wait(30) != 0
    until(
        lambda: any("line 1 is not a registration" in line for line in process.errors), "the reason"
    )
    assert path.read_text() == "[server]\n"
