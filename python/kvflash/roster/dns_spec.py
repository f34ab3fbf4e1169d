"""A ``--worker`` that stands for every address of a DNS name."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

import dns.exception
import dns.inet
import dns.name

from kvflash._core import Frontend
from kvflash.errors import ConfigError
from kvflash.roster.flags import DNS_PREFIX

# Kind of record for each value of ``ip=``.
_RECORDS = {"4": "A", "6": "AAAA"}
_ANY_HOST = "tcp://*:"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, kw_only=True)
class DnsWorkers:
    """Engines behind a DNS name, all with the same ports."""

    # The URL with the name in it, used in logs, ``/health`` and between replicas.
    label: str
    # The name to look up, and the kinds of records: ``A``, ``AAAA`` or both.
    name: str
    records: tuple[str, ...]
    # A worker in the format of ``--worker``, with ``{host}`` for its address.
    template: str

    @staticmethod
    def parse(text: str) -> DnsWorkers:
        """Parse ``dns+http://name:port[,events=tcp://*:port][,replay=tcp://*:port][,ip=4|6]...``."""
        url, *options = (part.strip() for part in text.split(","))
        scheme, _, rest = url.removeprefix(DNS_PREFIX).rstrip("/").partition("://")
        authority, slash, path = rest.partition("/")
        name, colon, port = authority.partition(":")
        _check_name(url, authority, name)
        records = tuple(_RECORDS.values())
        template = [f"{scheme}://{{host}}{colon}{port}{slash}{path}"]
        for option in options:
            key, equals, value = (part.strip() for part in option.partition("="))
            if key == "id":
                raise ConfigError(
                    f"id={value} names one worker, and {name} may stand for many: leave it out"
                )
            if key == "ip" and equals:
                if value not in _RECORDS:
                    raise ConfigError(f"ip must be 4 or 6, got {value!r}")
                records = (_RECORDS[value],)
                continue
            if key in ("events", "replay"):
                if not value.startswith(_ANY_HOST):
                    raise ConfigError(
                        f"{key} must be tcp://*:port, where * is each address of {name}, "
                        f"got {value!r}"
                    )
                value = "tcp://{host}:" + value.removeprefix(_ANY_HOST)
            template.append(f"{key}{equals}{value}")
        if "{" in url or "}" in url:
            raise ConfigError(f"worker url {url!r} is not a URL")
        found = DnsWorkers(
            label=url.rstrip("/"), name=name, records=records, template=",".join(template)
        )
        # The core checks the rest of a worker; its errors are reported with the name.
        spec = found._with_host(name)
        try:
            Frontend.check_worker(spec)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix(f'--worker "{spec}": ')) from None
        return found

    def spec(self, address: Address) -> str:
        """The worker at ``address``, in the format of ``--worker``."""
        return self._with_host(f"[{address}]" if address.version == 6 else str(address))

    def _with_host(self, host: str) -> str:
        return self.template.replace("{host}", host)


def _check_name(url: str, authority: str, name: str) -> None:
    if authority.startswith("[") or dns.inet.is_address(name):
        raise ConfigError(
            f"{authority} is an address and needs no lookup: give it without {DNS_PREFIX}, "
            f"got {url!r}"
        )
    # An address's certificate would not contain the name.
    if not name or "@" in authority or not url.startswith(f"{DNS_PREFIX}http://"):
        raise ConfigError(f"worker url must be {DNS_PREFIX}http://name:port, got {url!r}")
    try:
        dns.name.from_text(name)
    except dns.exception.DNSException as error:
        raise ConfigError(f"{name!r} is not a DNS name: {error}") from None
