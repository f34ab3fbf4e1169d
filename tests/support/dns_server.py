"""A name server on a free port, with answers that a test can change while it runs."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from types import TracebackType

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from service import until

# Faults of a name, instead of an answer.
SERVFAIL, SILENCE, GARBAGE = "servfail", "silence", "garbage"


class DnsServer:
    """Answers A and AAAA over UDP and TCP, on one port of the loopback.

    Attributes:
        names: Addresses by name; a name that is not there does not exist.
        trouble: Faults instead of answers, by name, or by name and record.
        once: First answers of a name, by name: each is given once; None: it does not exist.
        is_truncating: Answers never fit into UDP.
        asked: Queries by name, record and transport.
    """

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.trouble: dict[str | tuple[str, str], str] = {}
        self.once: dict[str, list[list[str] | None]] = {}
        self.is_truncating = False
        self.asked: Counter[tuple[str, str, str]] = Counter()
        self._udp, self._tcp = self._bind()
        self.port = int(self._udp.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self._threads = [
            threading.Thread(target=self._serve_udp, daemon=True),
            threading.Thread(target=self._serve_tcp, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> DnsServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each in (self._udp, self._tcp):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def lookups(self, name: str, record: str = "A") -> int:
        """How often a record was asked for."""
        return self.asked[name, record, "udp"]

    def wait_lookups(self, name: str, more: int = 2, record: str = "A") -> None:
        """Until it was asked for so many more times: what the last but one said is taken then."""
        wanted = self.lookups(name, record) + more
        until(lambda: self.lookups(name, record) >= wanted, f"{more} lookups of {name}")

    @staticmethod
    def _bind() -> tuple[socket.socket, socket.socket]:
        """Both sockets on one port."""
        while True:
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            udp.bind(("127.0.0.1", 0))
            tcp = socket.socket()
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tcp.bind(udp.getsockname())
            except OSError:
                udp.close()
                tcp.close()
                continue
            tcp.listen(16)
            return udp, tcp

    def _serve_udp(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                wire, peer = self._udp.recvfrom(65_535)
                if not wire:
                    return
                answer = self._answer(wire, "udp")
                if answer is not None:
                    self._udp.sendto(answer, peer)

    def _serve_tcp(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._tcp.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(5)
                    with connection.makefile("rb") as stream:
                        size = int.from_bytes(stream.read(2), "big")
                        answer = self._answer(stream.read(size), "tcp")
                    if answer is not None:
                        connection.sendall(len(answer).to_bytes(2, "big") + answer)

    def _answer(self, wire: bytes, transport: str) -> bytes | None:
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        record = dns.rdatatype.to_text(question.rdtype)
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        trouble = self.trouble.get(name) or self.trouble.get((name, record))
        once = self.once.get(name)
        addresses = once.pop(0) if once else self.names.get(name)
        fitting = [one for one in addresses or () if (":" in one) == (record == "AAAA")]
        # Counted last: a test that waits for this lookup must change only the next answer.
        self.asked[name, record, transport] += 1
        if trouble == SILENCE:
            return None
        if trouble == GARBAGE:
            return wire[:2] + b"\xff" * 8
        if trouble == SERVFAIL:
            response.set_rcode(dns.rcode.SERVFAIL)
        elif addresses is None:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif fitting and self.is_truncating and transport == "udp":
            response.flags |= dns.flags.TC
        elif fitting:
            response.answer.append(dns.rrset.from_text(question.name, 5, "IN", record, *fitting))
        return response.to_wire(max_size=65_535)
