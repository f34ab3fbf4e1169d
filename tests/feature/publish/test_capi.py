"""libkvflash: what a C program publishes is what a real index matches; misuse is answered.

Needs a C compiler and, once, some minutes to build the library (`make capi`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvflash.discovery import open_discovery
from service import listener, until, wait_for_sequence
from support_indexer import query

ROOT = Path(__file__).parents[3]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", "~/.cache/kvflash/target")).expanduser()
LIBRARY = TARGET / "debug" / "libkvflash.so"
SOURCE = Path(__file__).parent / "capi" / "engine.c"
FLAGS = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-pthread", f"-I{ROOT}/capi/include"]
SIZE = 4
BUILD_S = 900

pytestmark = [
    pytest.mark.timeout(BUILD_S),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]


@pytest.fixture(scope="module")
def library():
    environment = {**os.environ, "CARGO_TARGET_DIR": str(TARGET)}
    command = ["make", "--silent", "-C", ROOT, "capi", "CAPI_PROFILE=dev"]
    subprocess.run(command, check=True, env=environment, timeout=BUILD_S)
    return LIBRARY


@pytest.fixture(scope="module")
def build(library, tmp_path_factory):
    """Compiles the C program, in the flavours of a test's choice."""

    def compiled(*flags, link=(f"-L{LIBRARY.parent}", "-lkvflash", f"-Wl,-rpath,{LIBRARY.parent}")):
        program = tmp_path_factory.mktemp("capi") / "engine"
        subprocess.run(["cc", *FLAGS, *flags, SOURCE, "-o", program, *link], check=True)
        return program

    return compiled


class Program:
    """The C program: lines of JSON out, words in."""

    def __init__(self, program, *arguments, **environment):
        self.popen = subprocess.Popen(
            [program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def line(self):
        text = self.popen.stdout.readline()
        assert text, self.popen.stderr.read()
        return text.strip()

    def said(self):
        return json.loads(self.line())

    def go_on(self):
        self.popen.stdin.write("go\n")
        self.popen.stdin.flush()

    def end(self):
        """Its status and what it complained of."""
        _, errors = self.popen.communicate(timeout=60)
        return self.popen.returncode, errors

    def close(self):
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def run_program():
    programs = []

    def start(*arguments, **environment):
        programs.append(Program(*arguments, **environment))
        return programs[-1]

    yield start
    for program in programs:
        program.close()


@pytest.fixture(params=["plain", "address sanitizer"])
def engine(request, build):
    if request.param == "plain":
        return build()
    probe = subprocess.run(
        ["cc", "-fsanitize=address", "-x", "c", "-", "-o", os.devnull],
        input="int main(void) { return 0; }", capture_output=True, text=True, check=False,
    )  # fmt: skip
    if probe.returncode:
        pytest.skip("the compiler has no address sanitizer")
    return build("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def register(http, model, where, rank):
    body = {
        "instance_id": 1, "model_name": model, "block_size": SIZE, "dp_rank": rank, **where
    }  # fmt: skip
    http.post("/register", body, expect=201)
    until(lambda: listener(http, 1, rank)["status"] == "active", "the publisher's socket")


def scores(http, model, first, blocks, **fields):
    """Tokens that each rank holds of a prompt that counts on from its first token."""
    tokens = list(range(first, first + blocks * SIZE))
    held = query(http, model, tokens, **fields)["scores"].get("1", {})
    return {rank: count for rank, count in held.items() if count}


def test_what_a_c_program_publishes_is_what_matches(http, engine, model, run_program):
    program = run_program(engine, "engine", 0, 0)
    places = [program.said(), program.said()]
    for rank, where in enumerate(places):
        register(http, model, where, rank)
    program.go_on()
    for rank in (0, 1):
        stats = program.said()
        wait_for_sequence(http, 1, stats["batches"] - 1, rank)
        counts = (stats["stored"], stats["removed"], stats["dropped"])
        assert counts == ((407, 200, 0), (1, 0, 0))[rank]
    assert scores(http, model, 100, 4) == {"0": 12, "1": 4}
    assert scores(http, model, 200, 1) == {}
    assert scores(http, model, 200, 1, lora_name="sql") == {"0": 4}
    assert scores(http, model, 300, 3) == {}
    assert scores(http, model, 300, 3, cache_salt="tenant-a") == {"0": 12}
    for thread in range(1, 5):
        for turn in range(100):
            held = scores(http, model, 1_000_000 * thread + turn * SIZE, 1)
            assert held == ({} if turn % 2 else {"0": 4}), (thread, turn)
    program.go_on()
    wait_for_sequence(http, 1, program.said()["batches"] - 1)
    assert scores(http, model, 100, 4) == {"1": 4}
    # A late subscriber gets all of it from the ring.
    late = {**places[1], "instance_id": 2, "dp_rank": 1}
    http.post("/register", {**late, "model_name": model, "block_size": SIZE}, expect=201)
    until(lambda: listener(http, 2, 1)["last_sequence"] == 0, "the replay")
    program.go_on()
    assert program.end() == (0, "")


def test_a_restarted_program_begins_at_0_and_with_nothing(http, build, model, run_program):
    engine = build()
    program = run_program(engine, "engine", 0, 0)
    where = program.said()
    register(http, model, where, 0)
    program.go_on()
    program.said()
    wait_for_sequence(http, 1, program.said()["batches"] - 1)
    assert scores(http, model, 100, 3) == {"0": 12}
    program.popen.kill()
    program.popen.wait()
    ports = [url.rpartition(":")[2] for url in (where["endpoint"], where["replay_endpoint"])]
    again = run_program(engine, "engine", *ports)
    again.said()
    until(lambda: scores(http, model, 100, 3) == {}, "what the dead one held to be gone")
    again.said()
    again.go_on()
    until(lambda: scores(http, model, 100, 3) == {"0": 12}, "what the new one holds")


def test_misuse_is_answered_and_harms_nothing(engine, run_program):
    program = run_program(engine, "misuse")
    assert program.line() == "refused what it must"
    assert program.end() == (0, "")


def found(folder):
    """Entries that Python's discovery finds."""

    async def look():
        discovery = open_discovery("file", folder=folder)
        keys = await discovery.get_prefix("v1/")
        await discovery.close()
        return keys

    return asyncio.run(look())


def test_an_announcement_ends_with_its_process_and_is_not_made_twice(build, run_program, tmp_path):
    engine = build()
    places = {"KVFLASH_DISCOVERY_DIR": str(tmp_path), "KVFLASH_EVENTS_PORT": ""}
    program = run_program(engine, "older", **places)
    assert program.line() == "published"
    assert set(found(tmp_path)) == {"v1/events/tests/backend/9/0"}
    status, errors = run_program(engine, "older", **places).end()
    assert status != 0
    assert "another publisher that lives" in errors
    assert set(found(tmp_path)) == {"v1/events/tests/backend/9/0"}
    program.popen.kill()
    program.popen.wait()
    assert found(tmp_path) == {}
    again = run_program(engine, "older", **places)
    assert again.line() == "published"
    assert set(found(tmp_path)) == {"v1/events/tests/backend/9/0"}
    elsewhere = {**places, "KVFLASH_DISCOVERY": "etcd"}
    status, errors = run_program(engine, "older", **elsewhere).end()
    assert status != 0
    assert "KVFLASH_DISCOVERY is etcd" in errors


def test_older_calls_have_a_publisher_of_the_process(http, engine, model, run_program, tmp_path):
    program = run_program(
        engine, "older", KVFLASH_DISCOVERY_DIR=str(tmp_path / "discovery"),
        KVFLASH_HOST="", KVFLASH_EVENTS_PORT="", KVFLASH_REPLAY_PORT="",
    )  # fmt: skip
    assert program.line() == "published"
    ((key, value),) = found(tmp_path / "discovery").items()
    assert key == "v1/events/tests/backend/9/0"
    where = json.loads(value)
    assert (where.pop("kind"), where.pop("block_size")) == ("zmq", SIZE)
    register(http, model, where, 0)
    until(lambda: scores(http, model, 1, 2) == {"0": 8}, "both blocks")
    program.go_on()
    assert program.line() == "removed"
    until(lambda: scores(http, model, 1, 2) == {"0": 4}, "one block")
    program.go_on()
    assert program.line() == "cleared"
    until(lambda: scores(http, model, 1, 2) == {}, "no block")
    program.go_on()
    assert program.end() == (0, "")
    assert found(tmp_path / "discovery") == {}
    assert list((tmp_path / "discovery" / "keys").iterdir()) == []
    assert list((tmp_path / "discovery" / "leases").iterdir()) == []


DYNAMO = """
#include "kvflash_dynamo.h"
int main(void) {
    uint32_t tokens[4] = {1, 2, 3, 4};
    size_t sizes[1] = {4};
    uint64_t names[1] = {7};
    dynamo_llm_result_t ok = dynamo_llm_init("tests", NULL, 9, 4);
    if (ok || dynamo_llm_load_publisher_create()) return 1;
    if (dynamo_kv_event_publish_stored(0, tokens, sizes, names, 1, NULL, 0)) return 2;
    if (dynamo_kv_event_publish_removed(1, names, 1)) return 3;
    if (dynamo_kv_event_publish_cleared(2)) return 4;
    return dynamo_llm_shutdown() ? 5 : 0;
}
"""


def test_dynamos_names_are_names_of_the_older_calls(library, tmp_path):
    source, program = tmp_path / "engine.c", tmp_path / "engine"
    source.write_text(DYNAMO)
    link = [f"-L{LIBRARY.parent}", "-lkvflash", f"-Wl,-rpath,{LIBRARY.parent}"]
    subprocess.run(["cc", *FLAGS, source, "-o", program, *link], check=True)
    environment = {**os.environ, "KVFLASH_DISCOVERY_DIR": str(tmp_path / "discovery")}
    assert subprocess.run([program], env=environment, check=False).returncode == 0
    header = (ROOT / "capi" / "include" / "kvflash.h").read_text()
    aliases = (ROOT / "capi" / "include" / "kvflash_dynamo.h").read_text()
    older = re.findall(r"^int (kvflash_(?:llm|kv_event)_\w+)\(", header, re.MULTILINE)
    assert len(older) == 5
    for name in older:
        assert f"#define {name.replace('kvflash', 'dynamo')} {name}\n" in aliases


def test_it_can_be_linked_statically(build, library, run_program):
    archive = str(library.with_suffix(".a"))
    engine = build(link=(archive, "-lstdc++", "-lm", "-ldl"))
    linked = subprocess.run(["ldd", engine], capture_output=True, text=True, check=True)
    assert "libkvflash" not in linked.stdout
    program = run_program(engine, "misuse")
    assert program.line() == "refused what it must"
    assert program.end() == (0, "")


def test_the_header_is_cxx_too(tmp_path):
    source = tmp_path / "header.cc"
    source.write_text('#include "kvflash.h"\nint main() { return KVFLASH_OK; }\n')
    flags = ["-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{ROOT}/capi/include"]
    subprocess.run(["c++", *flags, "-fsyntax-only", source], check=True)


def test_nothing_but_its_functions_can_be_seen(library):
    """An engine may have another libzmq in its process."""
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    header = (ROOT / "capi" / "include" / "kvflash.h").read_text()
    declared = {
        word.partition("(")[0].lstrip("*")
        for line in header.splitlines()
        if line.startswith(("int kvflash_", "const char *kvflash_"))
        for word in line.split()
        if "(" in word
    }
    assert len(declared) >= 14
    assert names == declared
