"""The command ``kvflash``: what it prints, how it refuses, and that it starts light."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvflash import command, console
from kvflash.command import COMMANDS, main, main_of
from kvflash.doctor.app import parse_args as doctor
from kvflash.frontend.args import parse_args as frontend
from kvflash.indexer.args import parse_args as indexer
from kvflash.mocker.args import parse_args as mocker
from kvflash.router import parse_args as router

ROOT = Path(__file__).parents[3]
SERVICES = {"frontend": frontend, "indexer": indexer, "mocker": mocker, "router": router}


def test_the_wheel_installs_it() -> None:
    line = f'\n[project.scripts]\nkvflash = "{command.__name__}:{main.__name__}"\n'
    assert line in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_alone_it_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    for name, line in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_main_and_its_own_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(main_of(name))
    for argv in ([name, "--help"], ["help", name]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: kvflash {name} ")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvflash {metadata.version('kvflash')}\n"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fronted", "unknown command 'fronted'; did you mean 'frontend'?"),
        ("explian", "unknown command 'explian'; did you mean 'explain'?"),
        ("zzz", "unknown command 'zzz' ("),
        ("--port", "a command comes before flags, got '--port'"),
    ],
)
def test_an_unknown_command_is_refused_in_one_line(
    name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvflash: error: {told}") and "kvflash --help" in line


def test_a_command_is_named_as_it_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    for called, wanted in (
        ("/usr/bin/kvflash", "kvflash router"),
        ("/lib/kvflash/__main__.py", "kvflash router"),
        ("/lib/kvflash/router/__main__.py", "python -m kvflash.router"),
        ("/lib/kvflash/router.py", "python -m kvflash.router"),
        ("/app/router.py", "kvflash router"),
    ):
        monkeypatch.setattr(sys, "argv", [called, "router"])
        assert console.program("router") == wanted


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvflash.doctor.__main__.main", interrupted)
    assert main(["doctor"]) == 130


def test_ctrl_c_while_a_command_is_loaded_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "main_of", interrupted)
    assert main(["doctor"]) == 130


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["keys", "list"]])
@pytest.mark.parametrize(
    ("output", "ended"),
    [
        (
            "full",
            (1, "kvflash: error: standard output can't be written: No space left on device\n"),
        ),
        ("without a reader", (1, "")),
        ("closed", (0, "")),
    ],
)
def test_an_output_that_takes_nothing_is_no_traceback(
    output: str, ended: tuple[int, str], words: list[str], unbuffered: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ops:certificate:client\n")
    reader, pipe = os.pipe()
    os.close(reader)
    with os.fdopen(pipe, "w") as unread, Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvflash", *words], check=False, text=True,
            stdout=full if output == "full" else unread, stderr=subprocess.PIPE,
            preexec_fn=(lambda: os.close(1)) if output == "closed" else None,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered, "KVFLASH_KEYS_FILE": str(keys)},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == ended


@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_that_takes_nothing_is_no_traceback_of_a_module_either(name: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", f"kvflash.{name}", "--help"], check=False, text=True,
            stdout=full, stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": ""},
        )  # fmt: skip
    reason = "kvflash: error: standard output can't be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, reason)


def test_an_argument_that_is_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["frontend", "--discovery", "none", "--worker", "http://a\udcff:80"]
    monkeypatch.setattr(sys, "argv", ["kvflash", *words])
    assert main() == 2
    wanted = "kvflash: error: 'http://a\\udcff:80' is not UTF-8; every argument must be\n"
    assert capsys.readouterr().err == wanted


def test_a_closed_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["explain", "localhost:1", "--model", "m", "--file", "-"]) == 2
    assert "error: --file -: standard input is closed" in capsys.readouterr().err


def test_nothing_heavy_is_loaded_before_the_command_is_known() -> None:
    script = """import sys
from kvflash.command import main
main([])
heavy = ('argparse', 'asyncio', 'logging', 'json', 'zmq', 'aiohttp', 'yaml', 'importlib.metadata')
found = [name for name in heavy if name in sys.modules]
assert not found, found
ours = sorted(name[8:] for name in sys.modules if name.startswith('kvflash.'))
assert ours == ['_core', 'command', 'errors', 'lazy', 'output'], ours"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_help_has_the_ten_that_matter_first_and_one_line_for_each_flag(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    with pytest.raises(SystemExit):
        SERVICES[name](["--help"])
    head, *sections = re.split(r"\n\n(?=[A-Z][^\n]*:\n)", capsys.readouterr().out)
    assert head.startswith(f"usage: kvflash {name} [--flag VALUE ...]")
    assert len(sections) >= 5
    first, last = sections[0].splitlines(), sections[-1].splitlines()
    assert first[0] == "Flags to know first:" and first[1].startswith("  --config FILE ")
    assert "--version" in last[2]
    flags = 0
    for section in sections:
        lines = section.split("\n\n")[0].splitlines()[1:]
        # A long name has a line of its own, and its text is the next one.
        texts = [line[38:] for line in lines if line[36:38] == "  " and line[38:39].strip()]
        flags += len(texts)
        if section is sections[0]:
            assert len(texts) == 10
        for text in texts:
            assert text[0].isupper() or text.startswith(("auto (def", "error, ", "debug, ")), text
            assert len(text) <= 100 and not text.endswith("."), text
    assert flags > 15


@pytest.mark.parametrize("parse", SERVICES.values())
@pytest.mark.parametrize(
    ("wrong", "meant"), [("--prot", "--port"), ("--confg=x", "--config"), ("--hots", "--host")]
)
def test_an_unknown_flag_is_refused_with_what_was_meant(
    parse: Callable[[list[str]], Any], wrong: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([wrong, "1"])
    assert ended.value.code == 2
    told = f"unrecognized arguments: {wrong} 1; did you mean {meant!r}?"
    assert told in capsys.readouterr().err


def test_an_abbreviated_flag_is_refused_with_its_whole_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        SERVICES["frontend"](["--router-temp", "1"])
    # By its letters --router-ttl is nearer.
    assert "did you mean '--router-temperature'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("http://e:1", "name an engine by --worker URL"),
        ("8000", "put a value right after its flag"),
    ],
)
def test_a_word_without_a_flag_is_refused_with_a_hint(
    word: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        SERVICES["frontend"]([word])
    assert ended.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize("parse", [frontend, indexer, router])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--reuse-port", "true"], "arguments: true; --reuse-port is a switch and takes no value"),
        (["--reuse-port=true"], "--reuse-port: is a switch and takes no value, got 'true'"),
        (["true", "--reuse-port"], "put a value right after its flag"),
    ],
)
def test_a_switch_with_a_value_is_refused_as_a_switch(
    parse: Callable[[list[str]], Any],
    words: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert told in error and "ignored" not in error


def test_words_of_a_command_may_not_follow_a_switch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        doctor(["http://a", "--json", "http://b"])
    assert "words without a flag together before the flags" in capsys.readouterr().err


def test_values_without_commas_are_refused_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        SERVICES["indexer"](["--port", "1", "--peers", "http://a:1", "http://b:1", "http://c:1"])
    told = "arguments: http://b:1 http://c:1; separate the values of --peers with commas\n"
    assert told in capsys.readouterr().err


def test_several_workers_may_stand_behind_one_flag() -> None:
    args = frontend(["--worker", "http://a", "http://b", "--port", "1", "--worker", "http://c"])
    assert (args.workers, args.port) == (["http://a", "http://b", "http://c"], 1)
    args = frontend(["--prefill-worker", "http://a", "http://b", "--shadow-policy", "kv", "random"])
    assert args.prefill_workers == ["http://a", "http://b"]
    assert args.shadow_policies == ["kv", "random"]
    assert [one["url"] for one in router(["--worker", "http://a", "http://b,id=7"]).workers] == [
        "http://a",
        "http://b",
    ]
