"""Python processes for tests, forked from one that has imported what they need.

Most of the work of a process that answers a few requests is to import packages. One that was forked
has these already; arguments, environment, working directory, output and the limit of open files are
its own.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

# What the processes of tests import; nothing of it may start a thread.
PACKAGES = (
    "kvflash.frontend.app",
    "kvflash.indexer.service",
    "kvflash.llm",
    "kvflash.mocker.app",
    "kvflash.mocker.publisher",
    "kvflash.mocker.worker",
    "kvflash.router.service",
    "kvflash.runtime.distributed",
    "kvflash.vllm",
    "tiny_llama",
)
# Not in every environment that runs tests: the clients' own has no NATS.
OPTIONAL = ("nats.aio.client", "kvflash.runtime.nats", "kvflash.state.attach")
# Read by the interpreter, the loader or an import, so before a forked process has its own.
READ_AT_START = ("LD_", "PYTHON", "SSL_", "FAKETIME", "DONT_FAKE", "NO_FAKE")
# But this one takes effect later, too.
SEARCHED = "PYTHONPATH"
MESSAGE_BYTES_MAX = 1 << 20
FILES_MAX = 1 << 16


class Forked:
    """A process as :class:`subprocess.Popen` has it, as far as tests need one."""

    def __init__(
        self, pid: int, status: int, stdout: int, stderr: int, stdin: int | None = None
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = None if stdin is None else os.fdopen(stdin, "w", encoding="utf-8")
        self.stdout = os.fdopen(stdout, encoding="utf-8")
        self.stderr = os.fdopen(stderr, encoding="utf-8")
        self._status = status

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: It still runs after ``timeout`` seconds.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            status = int.from_bytes(os.read(self._status, 4), sys.byteorder)
            os.close(self._status)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Forks:
    """The process that forks, seen from the tests; started with the first one that is wanted.

    Args:
        env: Its environment, whatever the first one has: a leaping clock must not become that of
            all others.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._env = dict(env)

    def start(
        self, words: Sequence[str], env: Mapping[str, str], *, takes_input: bool = False
    ) -> Forked | None:
        """``python -m MODULE ARGS``, or a script by its path.

        Args:
            words: The module or script, and its arguments.
            env: Its environment.
            takes_input: It reads what the caller writes, not what the tests' own input is.

        Returns:
            None if its environment differs in what is read before it has its own, and where the
            system tells of the end of a process to its parent only.
        """
        if not hasattr(os, "pidfd_open") or read_at_start(env) != read_at_start(self._env):
            return None
        with self._lock:
            if self._control is None:
                self._control = self._serve()
            pipes = [os.pipe() for _ in range(3)]
            order = {
                "words": list(words),
                "env": dict(env),
                "folder": str(Path.cwd()),
                "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            }
            theirs = [writing for _, writing in pipes]
            stdin: int | None = None
            if takes_input:
                reading, stdin = os.pipe()
                theirs.append(reading)
            socket.send_fds(self._control, [json.dumps(order).encode()], theirs)
            for end in theirs:
                os.close(end)
            pid = self._control.recv(4)
            assert pid, "the process that forks has ended; its error stands above"
            stdout, stderr, status = (reading for reading, _ in pipes)
            return Forked(int.from_bytes(pid, sys.byteorder), status, stdout, stderr, stdin)

    def _serve(self) -> socket.socket:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            null = subprocess.DEVNULL
            fork = subprocess.Popen(command, stdout=null, env=self._env, pass_fds=[theirs.fileno()])

        def end() -> None:
            control.close()
            fork.wait()

        atexit.register(end)
        return control


def read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """What of an environment a process has to be started with."""
    return {
        key: value
        for key, value in env.items()
        if key.startswith(READ_AT_START) and key != SEARCHED
    }


def _fork(control: socket.socket) -> list[str] | None:
    """Fork for every order until the tests end; returns in each child, with its words."""
    running: dict[int, tuple[int, int]] = {}
    poller = select.poll()
    poller.register(control, select.POLLIN)
    while True:
        for ready, _ in poller.poll():
            if ready != control.fileno():
                poller.unregister(ready)
                os.close(ready)
                pid, status = running.pop(ready)
                os.write(status, os.waitpid(pid, 0)[1].to_bytes(4, sys.byteorder))
                os.close(status)
                continue
            text, given, *_ = socket.recv_fds(control, MESSAGE_BYTES_MAX, 4)
            if not text:
                return None
            pid = os.fork()
            if pid == 0:
                control.detach()
                os.dup2(given[0], 1)
                os.dup2(given[1], 2)
                if len(given) > 3:
                    os.dup2(given[3], 0)
                os.closerange(3, FILES_MAX)
                order = json.loads(text)
                os.chdir(order["folder"])
                resource.setrlimit(resource.RLIMIT_NOFILE, order["files"])
                os.environ.clear()
                os.environ.update(order["env"])
                return list(order["words"])
            status = given.pop(2)
            for end in given:
                os.close(end)
            watched = os.pidfd_open(pid)
            running[watched] = (pid, status)
            poller.register(watched, select.POLLIN)
            control.send(pid.to_bytes(4, sys.byteorder))


def _run(words: list[str]) -> None:
    """As the interpreter does it with these words."""
    program, *_ = sys.argv = words
    sys.path[1:1] = filter(None, os.environ.get(SEARCHED, "").split(os.pathsep))
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _end(status: int) -> NoReturn:
    """As the interpreter ends, but without taking its modules apart; so multiprocessing does it.

    That would copy most of what was imported before the fork: more work than a service's start.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    for package in PACKAGES:
        importlib.import_module(package)
    for package in OPTIONAL:
        with suppress(ModuleNotFoundError):
            importlib.import_module(package)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What is there now is never collected, nor copied for it.
    gc.freeze()
    found = _fork(socket.socket(fileno=int(sys.argv[1])))
    if found is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The tests may run under nohup; their processes do not.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        try:
            _run(found)
        except SystemExit as end:
            # The interpreter prints any other.
            if not isinstance(end.code, int | None):
                raise
            _end(end.code or 0)
        _end(0)
