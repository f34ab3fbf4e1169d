"""Workers of every kind behind wires that can be cut without a word, and how answers ended."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from kvflash.discovery.folder import Folder
from servers import EtcdServer, NatsServer
from service import SUPPORT, Process, until
from support_frontend import CHAT, DONE, Answer, Call, FrontendProcess
from wire import Wire

KINDS = ("openai", "tcp", "http", "nats")
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Say it"}], "max_tokens": 50}
STREAM = {**BODY, "stream": True}
# For those that wait for the end of a silence; long enough for every decent answer here.
IMPATIENT = ("--first-byte-timeout", "1.5", "--stream-idle-timeout", "1.5")
ACTIVE = (
    "kvflash_requests_in_flight",
    "kvflash_turns_waiting",
    "kvflash_worker_active_blocks",
    "kvflash_worker_active_prefill_tokens",
    "kvflash_worker_active_requests",
)


class Site:
    """A frontend, and workers of one kind, each behind a wire of its own.

    Args:
        kind: One of KINDS.
        folder: For its files.
        flags: Of the frontend.
        env: Of all processes.
        discovery: ``file`` or ``etcd``, for workers of the runtime.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        discovery: str = "file",
    ) -> None:
        self.kind = kind
        self.folder = folder
        self.env = {
            "KVFLASH_DISCOVERY_DIR": str(folder / "discovery"),
            "HOLD_DIR": str(folder),
            **(env or {}),
        }
        self.open = contextlib.ExitStack()
        self.processes: dict[str, Process] = {}
        self.ids: dict[str, int] = {}
        self.wires: dict[str, Wire] = {}
        self._asked = 0
        self._nats: NatsServer | None = None
        if kind == "nats":
            self._nats = self.open.enter_context(contextlib.closing(NatsServer(folder)))
            self.env["NATS_SERVER"] = self._nats.url
        self._etcd: EtcdServer | None = None
        if discovery == "etcd":
            self._etcd = self.open.enter_context(contextlib.closing(EtcdServer(folder)))
            self.env |= {"KVFLASH_DISCOVERY": "etcd", "ETCD_ENDPOINTS": self._etcd.url}
            # Workers that go without a word are waited for as long.
            self.env["LEASE_TTL_S"] = "5"
        if kind == "openai":
            discovery = "none"
        common = ("--router-mode", "round-robin", "--health-interval", "0.2")
        self.frontend = self.open.enter_context(
            FrontendProcess("--discovery", discovery, *common, *flags, env=self.env)
        )

    def __enter__(self) -> Site:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes.values():
            process.close()
        self.open.close()

    # -- workers

    def start(self, *names: str, role: str = "decode") -> None:
        """Start workers, and wait until they serve."""
        for name in names:
            if self.kind == "openai":
                self._start_engine(name, role)
            else:
                self._start_worker(name, role)
            self.frontend.wait_healthy(self.ids[name])

    def _start_engine(self, name: str, role: str) -> None:
        process = self._process(name, "openai", role)
        url = str(process.ready()["url"])
        wire = self._wire(name, url.removeprefix("http://"))
        self.ids[name] = self.frontend.add(f"http://{wire.address}", role=role)

    def _start_worker(self, name: str, role: str) -> None:
        env = dict(self.env)
        if self._nats is not None:
            wire = self._wire(name, f"127.0.0.1:{self._nats.port}")
            env["NATS_SERVER"] = f"nats://{wire.address}"
        if self._etcd is not None:
            wire = self._wire(f"{name} to etcd", f"127.0.0.1:{self._etcd.port}")
            env["ETCD_ENDPOINTS"] = f"http://{wire.address}"
        process = self._process(name, "tokens", role, self.kind, env=env)
        number = self.ids[name] = int(process.ready()["id"])
        if self._nats is None and self._etcd is None:
            self._put_behind_wire(name, f"v1/instances/tests/{role}/generate/{number}")

    def _put_behind_wire(self, name: str, key: str) -> None:
        """Have others find a wire where a worker announced its own port."""
        discovery, number = Folder(Path(self.env["KVFLASH_DISCOVERY_DIR"])), self.ids[name]
        lease, value = until(lambda: discovery.read(key), f"{name} to be announced")
        instance = json.loads(value)
        field = {"tcp": "address", "http": "url"}[self.kind]
        scheme, _, address = instance["transport"][field].rpartition("//")
        path = address.partition("/")[2]
        wire = self._wire(name, address.partition("/")[0])
        where = "/".join([wire.address, *([path] if path else [])])
        instance["transport"][field] = f"{scheme}//{where}" if scheme else where
        with until(discovery.try_lock, "the folder's lock"):
            discovery.write(key, json.dumps(instance).encode(), lease)
        until(lambda: wire.address in self._url(number), f"{name} to be found behind its wire")

    def _url(self, number: int) -> str:
        return str(self.frontend.workers().get(number, {}).get("url"))

    def _process(
        self, name: str, kind: str, *args: str, env: dict[str, str] | None = None
    ) -> Process:
        made = Process(str(SUPPORT / "double.py"), kind, name, *args, env=env or self.env)
        self.processes[name] = made
        return made

    def _wire(self, name: str, target: str) -> Wire:
        self.wires[name] = Wire(target)
        self.open.callback(self.wires[name].close)
        return self.wires[name]

    def tell(self, name: str, word: str) -> None:
        """``mute``, ``hold`` or ``drip``: see double.py."""
        (self.folder / f"{name}.{word}").touch()

    def untell(self, name: str, word: str) -> None:
        (self.folder / f"{name}.{word}").unlink()

    def running(self, name: str) -> int:
        """Requests that run at a worker, as it counts them itself."""
        count = self.folder / f"{name}.running"
        return int(count.read_text()) if count.exists() else 0

    def wait_left(self, name: str) -> None:
        until(lambda: self.ids[name] not in self.frontend.workers(), f"{name} to be gone")

    def wait_running(self, name: str, count: int) -> None:
        until(lambda: self.running(name) == count, f"{count} requests to run at {name}")

    def silence(self, name: str, how: str) -> None:
        """Make a worker a half-open peer: its process ``stopped``, or all its wires ``cut``."""
        if how == "stopped":
            self.processes[name].popen.send_signal(signal.SIGSTOP)
        for wire in self._wires_of(name, how):
            wire.freeze()

    def wake(self, name: str, how: str) -> None:
        if how == "stopped":
            self.processes[name].popen.send_signal(signal.SIGCONT)
        for wire in self._wires_of(name, how):
            wire.thaw()

    def _wires_of(self, name: str, how: str) -> list[Wire]:
        return [self.wires[one] for one in self.wires if one.split()[0] == name and how == "cut"]

    # -- requests

    def pin(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "nvext": {"backend_instance_id": self.ids[name]}}

    def call(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Call:
        self._asked += 1
        return Call(self.frontend.url, CHAT, body, headers)

    def ask(self, body: dict[str, Any]) -> str:
        """One request; how it ended, see :func:`end_of`."""
        return end_of(self.call(body))

    @contextlib.contextmanager
    def asking(self, count: int, body: dict[str, Any]) -> Iterator[list[Future[str]]]:
        """As many requests at once; how they end."""
        with ThreadPoolExecutor(count) as pool:
            yield [pool.submit(self.ask, body) for _ in range(count)]

    def hang_up(self, call: Call) -> None:
        """Leave before the head of the answer."""
        self._asked -= 1
        call.hang_up()

    def failed_attempts(self) -> float:
        metrics = self.frontend.metrics()
        return sum(v for k, v in metrics.items() if k.startswith("kvflash_attempts_failed_total"))

    def check_settled(self) -> None:
        """Nothing runs or is booked any more, and each request had one answer."""

        def left() -> dict[str, Any]:
            found: dict[str, Any] = {
                k: v for k, v in self.frontend.metrics().items() if k.startswith(ACTIVE) and v
            }
            for number, worker in self.frontend.workers().items():
                loads = json.dumps(worker["loads"])
                if any(digit in loads for digit in "123456789"):
                    found[f"loads of {number}"] = loads
            return found

        until(lambda: not left() or None, f"the load to go; left: {left()}")
        for name, process in self.processes.items():
            if process.popen.poll() is None:
                self.wait_running(name, 0)
        metrics = self.frontend.metrics()
        answered = f'kvflash_requests_total{{endpoint="{CHAT}"'
        assert sum(v for k, v in metrics.items() if k.startswith(answered)) == self._asked


def end_of(call: Call) -> str:
    """Read an answer to its end and check that it has one.

    Returns:
        The worker's NAME for a complete answer, else ``broken`` for one that ended with an error
        after its first byte, ``cut`` where the connection was broken, or the refusal's status.
    """
    try:
        answer = call.finish()
    except (http.client.IncompleteRead, ConnectionResetError):
        return "cut"
    if answer.status != 200:
        assert set(answer.json) == {"error"}, answer.body
        return str(answer.status)
    if not answer.headers["content-type"].startswith("text/event-stream"):
        (choice,) = answer.json["choices"]
        assert choice["finish_reason"], answer.body
        return str(choice["message"]["content"]).split()[0]
    return _end_of_stream(answer)


def _end_of_stream(answer: Answer) -> str:
    assert answer.body.count(DONE) == 1 and answer.body.endswith(DONE), answer.body
    texts = [event for event in answer.body.removesuffix(DONE).split(b"\n\n") if event.strip()]
    events = [json.loads(text.strip().removeprefix(b"data: ")) for text in texts]
    choices = [event["choices"][0] for event in events if event.get("choices")]
    errors = [event for event in events if "error" in event]
    finishes = [choice for choice in choices if choice.get("finish_reason")]
    assert len(errors) + len(finishes) == 1, answer.body
    assert "error" in events[-1] or not errors, answer.body
    if errors:
        return "broken"
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text.endswith("says hello to you"), answer.body
    return text.split()[0]
