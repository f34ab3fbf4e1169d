"""The flags that say where a service finds its workers."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from kvflash.config import bounded_float
from kvflash.errors import ConfigError, InvalidArgumentError
from kvflash.flags import Flags, source_of
from kvflash.runtime.component import check_name

__all__ = ["DNS_PREFIX", "FleetFlags", "add_fleet_flags"]

#: What the URL of a worker begins with that stands for every address of a name.
DNS_PREFIX = "dns+"


@dataclass(frozen=True, kw_only=True)
class FleetFlags:
    """What the flags say; see ``--help``.

    Attributes:
        workers: Engines, as ``--worker`` takes them.
        worker_dns_interval_secs: Seconds between two lookups of a name among them.
        worker_dns_server: Who is asked for names; None: as ``/etc/resolv.conf`` says.
        discovery: ``mem``, ``file``, ``etcd`` or ``none``; None: as the service wants.
        namespace: Only workers of this one; None: of all.
    """

    #: Another way in which workers come.
    other_way: ClassVar[str] = "POST /workers"

    workers: Sequence[str] = ()
    worker_dns_interval_secs: float = 5.0
    worker_dns_server: tuple[str, int] | None = None
    discovery: str | None = None
    namespace: str | None = None

    @property
    def discovery_kind(self) -> str | None:
        """The discovery that is watched, if any."""
        return None if self.discovery == "none" else self.discovery

    def named_workers(self) -> Iterator[tuple[str, str, str]]:
        """Workers that flags name: what said so, the worker, and its role to be added to it."""
        yield from self._of_flag("--worker", self.workers)

    @staticmethod
    def _of_flag(flag: str, specs: Sequence[str], role: str = "") -> Iterator[tuple[str, str, str]]:
        yield from ((source_of(flag, spec), spec, role) for spec in specs)

    def check_dns(self) -> None:
        """Check that a name server has something to do.

        Raises:
            ConfigError: No worker is a name.
        """
        has_names = any(spec.startswith(DNS_PREFIX) for _, spec, _ in self.named_workers())
        if self.worker_dns_server is not None and not has_names:
            raise ConfigError(
                f"--worker-dns-server needs a --worker that begins with {DNS_PREFIX}: nothing else "
                "is looked up there"
            )

    def waits_for(self) -> str:
        """Where workers may come from, in words."""
        specs = [spec for _, spec, _ in self.named_workers() if spec.startswith(DNS_PREFIX)]
        ways = [*(f"addresses of {spec.partition(',')[0]}" for spec in specs), self.other_way]
        if self.discovery_kind is not None:
            scope = f"namespace {self.namespace}" if self.namespace else "any namespace"
            ways.insert(0, f"workers of {scope} in discovery {self.discovery_kind!r}")
        return " or ".join(ways)


def _server(text: str) -> tuple[str, int]:
    """Parse ``ADDRESS`` or ``ADDRESS:PORT`` of a name server, IPv6 in brackets before a port."""
    host, port = text, 53
    with contextlib.suppress(ValueError):
        parts = urlsplit(f"//{text}")
        if parts.port is not None and parts.netloc == text and "@" not in text:
            host, port = parts.hostname or "", parts.port
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        port = 0
    if port == 0:
        raise argparse.ArgumentTypeError(
            f"must be ADDRESS or ADDRESS:PORT of a name server, such as 10.0.0.10:53, got {text!r}"
        )
    return str(address), port


def _namespace(text: str) -> str:
    try:
        return check_name("a namespace", text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_fleet_flags(
    flags: Flags, *, without: str, role: str = "[,role=ROLE]", dest: str = "workers"
) -> None:
    """Add them.

    Args:
        flags: To these.
        without: What holds without ``--discovery``, in the help.
        role: What a worker may say of its role, in the help.
        dest: What ``--worker`` sets.
    """
    flags.add_list(
        "--worker",
        dest=dest,
        metavar=f"URL[,events=ADDRESS][,replay=ADDRESS][,id=N]{role}[,dp=N]",
        summary="Engines; dns+http://NAME stands for every address of a name",
    )
    flags.add(
        "--worker-dns-interval-secs",
        parse=bounded_float(0.1, 3_600),
        default=5.0,
        metavar="SECONDS",
        summary="Pause between two DNS lookups of dns+http:// workers",
    )
    flags.add(
        "--worker-dns-server",
        parse=_server,
        default=None,
        metavar="ADDRESS[:PORT]",
        summary="Name server for them instead of those in /etc/resolv.conf",
    )
    flags.add(
        "--discovery",
        "--store-kv",
        parse=str,
        default=None,
        choices=("mem", "file", "etcd", "none"),
        variables=("DYN_STORE_KV",),
        summary=f"Where to find workers; {without}",
    )
    flags.add(
        "--namespace",
        parse=_namespace,
        default=None,
        variables=("DYN_NAMESPACE",),
        metavar="NAME",
        summary="Use only the workers of this discovery namespace",
    )
