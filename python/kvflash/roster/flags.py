"""Flags that say where a service finds its workers."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from kvflash.errors import ConfigError, InvalidArgumentError
from kvflash.flags import source_of

#: Prefix of a worker URL that stands for every address of a name.
DNS_PREFIX = "dns+"


class FleetFlags:
    """Settings of a service's fleet; a base class of the service's settings."""

    #: Flags that name workers, with their field, and a role to append.
    worker_flags: ClassVar[Sequence[tuple[str, str, str]]]

    #: Where workers are added over HTTP.
    added_by: ClassVar[str] = "POST /workers"

    worker_dns_interval_secs: float
    worker_dns_server: tuple[str, int] | None
    discovery: str | None
    namespace: str | None

    @property
    def discovery_kind(self) -> str | None:
        """The discovery to watch, if any."""
        return None if self.discovery == "none" else self.discovery

    def named_workers(self, *, in_dns: bool) -> Iterator[tuple[str, str, str]]:
        """Workers that flags name, in DNS or by URL: the flag, the worker, a role to append."""
        for flag, field, role in self.worker_flags:
            for spec in getattr(self, field):
                if spec.startswith(DNS_PREFIX) == in_dns:
                    yield source_of(flag, spec), spec, role

    def check_dns(self) -> None:
        """Check that a name server is only set together with a name."""
        if self.worker_dns_server is not None and not any(self.named_workers(in_dns=True)):
            raise ConfigError(
                f"--worker-dns-server needs a --worker that begins with {DNS_PREFIX}: kvflash "
                "looks up only such names there"
            )

    def waits_for(self) -> str:
        """Where workers may come from, for messages."""
        specs = [spec for _, spec, _ in self.named_workers(in_dns=True)]
        ways = [*(f"addresses of {spec.partition(',')[0]}" for spec in specs), self.added_by]
        if self.discovery_kind is not None:
            scope = f"namespace {self.namespace}" if self.namespace else "any namespace"
            ways.insert(0, f"workers of {scope} in discovery {self.discovery_kind!r}")
        return " or ".join(ways)


def _server(text: str) -> tuple[str, int]:
    """Parse ``ADDRESS`` or ``ADDRESS:PORT`` of a name server, IPv6 in brackets before a port."""
    # Here, because few services have a name server of their own.
    import ipaddress  # noqa: PLC0415
    from urllib.parse import urlsplit  # noqa: PLC0415

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
    # Here, so that only users of a namespace wait for the runtime.
    from kvflash.runtime.component import check_name  # noqa: PLC0415

    try:
        return check_name("a namespace", text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


#: Parsers of the settings' strings, by key; see ``kvflash.settings.add_settings``.
PARSERS: dict[str, Callable[[str], Any]] = {
    "worker_dns_server": _server,
    "namespace": _namespace,
}
