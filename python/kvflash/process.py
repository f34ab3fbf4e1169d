"""What every service process does: log, serve, obey signals, end cleanly."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from types import FrameType
from typing import Protocol

from kvflash._core import Catalog, init_logging
from kvflash.transport import ZmqReceiver

__all__ = ["Service", "run_until_stopped", "start_logging"]

logger = logging.getLogger(__name__)


class Service(Protocol):
    """A service of the core."""

    @property
    def catalog(self) -> Catalog:
        """Its orders and frames."""

    def start(self, host: str, port: int) -> int:
        """Serve in the background; returns the port."""

    def stop(self) -> None:
        """Stop serving."""


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {"message": record.getMessage(), "logger": record.name}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        return json.dumps({"timestamp": stamp, "level": record.levelname, "fields": fields})


def start_logging(level: str, log_format: str) -> None:
    """Log to stderr, both languages alike."""
    init_logging(level, json=log_format == "json")
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)5s %(message)s"))
    python_level = {"trace": "debug", "warn": "warning"}.get(level, level).upper()
    logging.basicConfig(level=python_level, handlers=[handler])


def run_until_stopped(service: Service, *, host: str, port: int, name: str) -> None:
    """Serve until SIGTERM or SIGINT; prints one line with the address once it listens.

    Raises:
        ConfigError: The address can't be bound.
    """
    is_stopped = False

    def stop(signum: int, _frame: FrameType | None) -> None:
        nonlocal is_stopped
        is_stopped = True
        logger.info("%s: stopping on %s", name, signal.Signals(signum).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    bound = service.start(host, port)
    receiver = ZmqReceiver(service.catalog)
    receiver.start()
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    print(
        json.dumps({"event": "ready", "service": name, "url": f"http://{shown}:{bound}"}),
        flush=True,
    )
    catalog = service.catalog
    while not is_stopped:
        order = catalog.next_order(0.2)
        if order is not None:
            receiver.obey(order)
    service.stop()
    receiver.stop()
