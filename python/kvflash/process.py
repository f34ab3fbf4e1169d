"""The life of a service: log, serve, receive events, handle signals, shut down."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvflash._core import Frontend, Indexer, Router, init_logging
from kvflash.address import reachable
from kvflash.console import LogLine, announce, log_to_stderr, refuse, utc
from kvflash.errors import ClosedError, KvflashError
from kvflash.open_files import allow_open_files
from kvflash.roster.core import Replicas
from kvflash.settings import Args, warn_of_misspelt
from kvflash.signals import ending_signals
from kvflash.transport.receiver import Feed

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvflash.background import Background

logger = logging.getLogger(__name__)

#: How often an incomplete start is looked at again, seconds.
_GATE_PERIOD_S = 0.05


class FedService:
    """A core service with the transport that feeds it, in their own threads.

    Several may live in one process, each with its own sockets. A service starts once and stops
    once; as a context manager it does both. ``args`` has its host, port (0 picks a free one) and
    tls_cert_path. ``parts`` start after it, in this order, and stop before it, in reverse;
    ``replicas`` share the load of its last requests.
    """

    def __init__(
        self,
        core: Frontend | Indexer | Router,
        args: Args,
        *,
        replicas: Replicas | None = None,
        parts: Iterable[Background] = (),
    ) -> None:
        self._core, self._args = core, args
        self._scheme = "http" if args.tls_cert_path is None else "https"
        self._port: int | None = None
        self._replicas, self._parts = replicas or Replicas(), list(parts)
        self._feed = Feed(core.catalog, has_broker=self._replicas.is_nats)
        self._is_stopped = False

    @property
    def port(self) -> int:
        """The bound port.

        Raises:
            ClosedError: It has not started yet.
        """
        if self._port is None:
            raise ClosedError("the service has no port before it is started")
        return self._port

    @property
    def url(self) -> str:
        """URL at which this machine reaches it.

        Raises:
            ClosedError: It has not started yet.
        """
        return f"{self._scheme}://{reachable(self._args.host)}:{self.port}"

    def start(self) -> Self:
        """Serve HTTP and receive events in the background; returns itself.

        Raises:
            ConfigError: The address can't be bound, or NATS refuses the login.
            TransportError: NATS is required but does not answer; the message says what to start.
            ClosedError: It was started before, or failed to start.
        """
        self._replicas.check()
        if self._port is not None or self._is_stopped:
            raise ClosedError("a service can start only once; create a new one")
        try:
            self._port = self._core.start(self._args.host, self._args.port)
        except KvflashError:
            # Its health checks would go on, and log after the reason.
            self._core.stop()
            self._is_stopped = True
            raise
        self._feed.start()
        # As for the feed: the core's threads must not outlive the interpreter.
        atexit.register(self._end)
        self._replicas.start()
        for part in self._parts:
            part.start()
        return self

    def stop(self) -> None:
        """Stop serving and receiving; open requests get the drain time, an indexer's 5 s.

        Blocks until done.
        """
        for part in reversed(self._parts):
            part.stop()
        self._end()
        # Streams may go on for a while, and their load is shared until they end.
        self._replicas.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_listening(self) -> bool:
        """Whether clients reach it; False while another process at its port serves them."""
        return self._core.is_listening()

    def is_ready(self) -> bool:
        """Whether it has what it waits for at its start."""
        return True

    def announce_stop(self) -> None:
        """Report "not ready" ahead of a stop; requests are still accepted."""
        self._core.announce_stop()

    def _end(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        atexit.unregister(self._end)
        self._core.stop()
        self._feed.stop()


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {"message": record.getMessage(), "logger": record.name}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        line = {"timestamp": utc(record.created), "level": record.levelname, "fields": fields}
        return json.dumps(line)


def start_logging(level: str, log_format: str) -> None:
    """Log to stderr, from both languages; first warns of unknown environment variables."""
    init_logging(level, json=log_format == "json")
    python_level = "DEBUG" if level == "trace" else level.upper()
    log_to_stderr(python_level, _JsonFormatter() if log_format == "json" else LogLine())
    warn_of_misspelt()


def run_service(
    name: str,
    parse: Callable[[Sequence[str] | None], Any],
    make: Callable[[Any], FedService],
    argv: Sequence[str] | None,
) -> int:
    """Run ``kvflash NAME``: the service that ``make`` creates from the arguments, until a signal.

    Returns the exit status.
    """
    try:
        args = parse(argv)
        start_logging(args.log_level, args.log_format)
        allow_open_files()
        service = make(args)
        run_until_stopped(service, args, name=name)
    except KvflashError as error:
        return refuse(name, error, failure=2)
    return 0


def run_until_stopped(service: FedService, args: Any, *, name: str) -> None:
    """Serve until SIGTERM, SIGHUP or SIGINT; print a ``ready`` line with the address.

    If it starts before it is ready, the line is ``listening``, and ``ready`` follows. Between the
    signal and its stop, load balancers have ``--lame-duck-timeout`` to learn that they must send no
    more. A second signal ends the process at once.
    """
    stopped = []

    def stop(signum: int, _frame: FrameType | None) -> None:
        stopped.append(signum)
        # No Python signal handler would run while the core stops.
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        wait = 0 if signum == signal.SIGINT else args.lame_duck_timeout
        pause = f" in {wait:g} s, /ready is 503 until then" if wait else ""
        # An indexer has no running requests to wait for.
        drain_s = getattr(args, "drain_timeout", None)
        grace = "" if drain_s is None else f"; running requests get up to {drain_s:g} s"
        received = signal.Signals(signum).name
        logger.info(
            "%s: stopping on %s%s%s; a second signal ends it now", name, received, pause, grace
        )

    ours = ending_signals()
    for number in ours:
        signal.signal(number, stop)
    ring, heard = socket.socketpair()
    ring.setblocking(False)
    # The system may deliver the signal to any thread; one that waits for a lock would not wake up.
    signal.set_wakeup_fd(ring.fileno(), warn_on_full_buffer=False)
    service.start()

    def tell(event: str) -> None:
        announce({"event": event, "service": name, "url": service.url})

    def is_ready() -> bool:
        return service.is_listening and service.is_ready()

    if not is_ready():
        # The address is needed before: engines may have to be registered over HTTP first.
        tell("listening")
        heard.settimeout(_GATE_PERIOD_S)
        while not stopped and not is_ready():
            with contextlib.suppress(TimeoutError):
                heard.recv(1)
        heard.settimeout(None)
    if not stopped:
        tell("ready")
    while not stopped:
        heard.recv(1)
    if stopped[0] != signal.SIGINT:
        service.announce_stop()
        time.sleep(args.lame_duck_timeout)
    service.stop()
