"""Common behaviour of all commands: --version, two-line refusals, log lines."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import pytest

from kvflash.console import LogLine
from kvflash.doctor.app import parse_args as doctor
from kvflash.frontend.args import parse_args as frontend
from kvflash.indexer.args import parse_args as indexer
from kvflash.launcher.options import parse_options
from kvflash.mocker.args import parse_args as mocker
from kvflash.router import parse_args as router


def launcher(argv: Sequence[str]) -> Any:
    return parse_options("vllm", ("vllm",), argv)


COMMANDS = (doctor, frontend, indexer, launcher, mocker, router)


@pytest.mark.parametrize("parse", COMMANDS)
def test_every_command_has_a_version_and_refuses_in_two_lines(
    parse: Callable[[Sequence[str]], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvflash {metadata.version('kvflash')}\n"
    # A launcher passes on what it does not know.
    wrong = "--endpoint" if parse is launcher else "--nonsense"
    with pytest.raises(SystemExit) as ended:
        parse(["http://a", wrong] if parse is doctor else [wrong])
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.endswith(" ... (see --help)")
    assert ": error: " in error and wrong in error


def test_a_log_line_is_in_utc_as_the_core_writes_it() -> None:
    record = logging.LogRecord("n", logging.INFO, "", 0, "said", (), None)
    record.created = 86_400.25
    assert LogLine().format(record) == "1970-01-02T00:00:00.250000Z  INFO said"


def test_a_ready_line_without_a_reader_ends_no_service() -> None:
    script = """import logging
from kvflash.console import announce
logging.basicConfig(format='%(message)s')
announce({'event': 'ready'})
announce({'event': 'ready'})"""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], check=False, stdout=writer, stderr=subprocess.PIPE
        )
    finally:
        os.close(writer)
    assert done.returncode == 0
    why = os.strerror(errno.EPIPE)
    told = f"standard output can't be written, so the ready line is lost: {why}\n"
    assert done.stderr.decode() == told


def test_a_log_without_a_reader_ends_no_service() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kvflash.indexer", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer) as service:
        os.close(writer)
        assert service.stdout is not None
        assert json.loads(service.stdout.readline())["event"] == "ready"
        service.terminate()
        assert service.wait(30) == 0
