"""HTTP requests that report failures in the result, never by an exception."""

import http.client
import json
import re
import ssl
import time
from argparse import Namespace
from collections.abc import Collection
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvflash.address import masked
from kvflash.config import bounded_float
from kvflash.console import reason_of
from kvflash.errors import ConfigError, NotFoundError, TransportError
from kvflash.flags import Flags, variable_of
from kvflash.servers import is_address
from kvflash.table import printable

KEY_FILE = "--service-key-file"

#: Responses above this size are cut off; an indexer of 2,000 workers sends some MiB.
_ANSWER_BYTES_MAX = 256 * 1024 * 1024

#: Characters of a body in a message. Errors end with the next step, so few are cut.
_SAID_MAX = 1_000

# OpenSSL's codes for a certificate that no known authority has signed.
_UNKNOWN_AUTHORITY = range(18, 22)

# OpenSSL's reasons where the other side answers in clear text; which one depends on the version.
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "HTTP_REQUEST")

# A label in Prometheus text, with the separator in front of it.
_LABEL = r'[, ]*([^\s,="{}]+)="((?:\\.|[^"\\])*)"'

#: Time limit of a whole response, as a multiple of the limit for one read.
_SLOW = 10


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a request; without a response the status is 0, and ``error`` says why.

    ``fix`` is the next step where something is there that can't be asked in this way.
    ``refused`` is the cause for which a kvflash service let the request not in, such as ``no_key``.
    ``missing`` is what a kvflash service says with status 404: ``path`` or ``entry``.
    ``skew_s`` is how far the server's clock is ahead of ours, to a second, if it sent its time.
    """

    status: int = 0
    body: bytes = field(default=b"", repr=False)
    error: str = ""
    fix: str = ""
    refused: str = ""
    missing: str = ""
    seconds: float = 0.0
    skew_s: float | None = None

    @property
    def json(self) -> Any:
        """The body as JSON; None if it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def fields(self) -> dict[str, Any]:
        """The body as a JSON object; empty if it is anything else."""
        body = self.json
        return body if isinstance(body, dict) else {}

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode(errors="replace")

    @property
    def said(self) -> str:
        """The beginning of the body, for a message."""
        if self.error:
            return self.error
        body = self.fields
        message = body.get("error", body) if body else self.text
        if isinstance(message, dict):
            message = message.get("message", message)
        text = message if isinstance(message, str) else json.dumps(message)
        words = " ".join(printable(text).split())
        end = " ..." if len(words) > _SAID_MAX else ""
        return f"{self.status} {words[:_SAID_MAX]}{end}".strip()


def parse_url(text: str) -> str:
    """Parse an address such as ``http://host[:port][/path]``; the scheme is optional.

    A ``/v1`` at the end, as in the base URL of OpenAI's clients, is left out.
    """
    url = text if "://" in text else f"http://{text}"
    is_legal = is_address(url, "http", "https")
    is_legal = is_legal and not (urlsplit(url).query or urlsplit(url).fragment)
    if not is_legal or any(mark <= " " or mark == "\x7f" for mark in text) or not text.isascii():
        raise ConfigError(
            "URL must be http://HOST[:PORT][/PATH], or https://..., with PORT in 1..=65535, got "
            f"{masked(text)!r}"
        )
    if "@" in urlsplit(url).netloc:
        raise ConfigError(f"URL must be without a login, which is not sent, got {masked(text)!r}")
    url = url.rstrip("/")
    return url.removesuffix("/v1") if urlsplit(url).path.endswith("/v1") else url


def add_timeout(flags: Flags) -> None:
    """Add the flag for the timeout of a request."""
    flags.add(
        "--timeout",
        parse=bounded_float(0.05, 600),
        default=5.0,
        metavar="SECONDS",
        summary="Longest wait for an answer",
    )


def add_key_file(flags: Flags) -> None:
    """Add the flag for the file that contains the service's key."""
    flags.add(
        KEY_FILE,
        metavar="FILE",
        variables=(variable_of(KEY_FILE),),
        summary=f"File with the key for the service, else that of {variable_of(KEY_FILE)}",
    )


def read_key(path: str | None, flag: str = KEY_FILE) -> str | None:
    """Read a key from the file that ``flag`` names, if it is given."""
    if not path:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: can't be read: {reason_of(error)}") from None
    key = checked_key(text, f"{flag} {path}")
    if key is None:
        raise ConfigError(f"{flag} {path}: is empty")
    return key


def checked_key(text: str, source: str) -> str | None:
    """The key in ``text``, without white space around it; None if there is nothing else.

    ConfigError for what no header can have names the source, and never shows the secret.
    """
    key = text.strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{source}: must be one key in one line of ASCII characters")
    return key or None


def ask(
    url: str,
    path: str,
    *,
    timeout_s: float,
    api_key: str | None = None,
    body: Any = None,
    method: str | None = None,
) -> Answer:
    """GET ``path`` below ``url``, or send ``body`` as JSON, by POST unless ``method`` is another.

    Never raises an exception.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    headers = {"accept": "application/json, text/plain, */*"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        headers["content-type"] = "application/json"
    started = time.monotonic()
    try:
        connection.request(method or _method(body), parts.path + path, data, headers=headers)
        response = connection.getresponse()
        now = time.time()
        answer = _read(response, started, _SLOW * timeout_s)
        return Answer(
            status=response.status,
            body=answer,
            refused=response.getheader("x-kvflash-refused", ""),
            missing=response.getheader("x-kvflash-missing", ""),
            seconds=time.monotonic() - started,
            skew_s=_skew_s(response.getheader("date"), now),
        )
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason, fix = _reason(error, url)
        return Answer(error=reason, fix=fix, seconds=time.monotonic() - started)
    finally:
        connection.close()


def _reason(error: Exception, url: str) -> tuple[str, str]:
    """Why there is no response, and the next step if something else than a service is there."""
    if isinstance(error, ssl.SSLCertVerificationError):
        fix = "give a URL with a name of the certificate, or renew it"
        if error.verify_code in _UNKNOWN_AUTHORITY:
            fix = "set SSL_CERT_FILE to the file of the CA that signed it"
        return f"the certificate is not trusted here: {error.verify_message.rstrip('.')}", fix
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        plain = f"http{url.removeprefix('https')}"
        return "this port does not speak TLS", f"if it speaks HTTP, use {plain}"
    is_closed = isinstance(error, http.client.RemoteDisconnected)
    if isinstance(error, http.client.BadStatusLine) and not is_closed:
        # The line itself would be TLS records, or frames of ZMQ.
        secure = f"https{url.removeprefix('http')}"
        fix = "correct the port" if url.startswith("https") else f"if it speaks TLS, use {secure}"
        return "this port does not speak HTTP", fix
    return printable(f"{type(error).__name__}: {error}"), ""


def _method(body: Any) -> str:
    return "GET" if body is None else "POST"


class Service:
    """The service that a command's arguments name; its URL or key file may raise ConfigError."""

    def __init__(self, args: Namespace) -> None:
        self.url = parse_url(args.url)
        self._timeout_s, self._key = args.timeout, read_key(args.service_key_file)

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Answer:
        """As :func:`ask`, with the timeout and the key of the command."""
        return ask(
            self.url, path, timeout_s=self._timeout_s, api_key=self._key, body=body, method=method
        )

    def demand(
        self, path: str, body: Any = None, method: str | None = None, *, but: Collection[int] = ()
    ) -> Answer:
        """As :meth:`ask`, for an answer that must be JSON with status 200, or have one of ``but``.

        Raises NotFoundError for status 404, else TransportError; both name address and reason.
        """
        answer = self.ask(path, body, method)
        asked = f"{method or _method(body)} {self.url}{path}"
        if answer.status in but:
            return answer
        if not answer.status:
            fix = answer.fix or "does the service run there?"
            raise TransportError(f"{asked}: {answer.error}; {fix}")
        if answer.status == 404:
            # An engine, or a service without this command, has no entries that could be missing.
            is_strange = answer.missing != "entry"
            hint = "; does a kvflash frontend or router run there?" if is_strange else ""
            raise NotFoundError(f"{asked}: {answer.said}{hint}")
        if answer.status == 401 and self._key is None:
            raise TransportError(f"{asked}: {answer.said}; name a file with a key by {KEY_FILE}")
        if answer.status != 200:
            raise TransportError(f"{asked}: {answer.said}")
        if answer.json is None:
            raise TransportError(f"{asked}: the answer is not JSON; is this a kvflash service?")
        return answer


def _read(response: http.client.HTTPResponse, started: float, limit_s: float) -> bytes:
    """Read the body; with the socket's timeout alone it could drip forever."""
    body = bytearray()
    while len(body) < _ANSWER_BYTES_MAX:
        part = response.read1(1 << 20)
        if not part:
            if response.length:
                raise http.client.IncompleteRead(bytes(body), response.length)
            break
        body += part
        if time.monotonic() > started + limit_s:
            raise TimeoutError(f"the answer was not complete after {limit_s:g} s")
    return bytes(body)


def _skew_s(date: str | None, now: float) -> float | None:
    if not date:
        return None
    try:
        # The server truncates to whole seconds: add half a second on average.
        return parsedate_to_datetime(date).timestamp() + 0.5 - now
    except (TypeError, ValueError, OverflowError):
        return None


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of one metric's samples in Prometheus text; invalid lines are skipped."""
    sample = re.compile(rf"{re.escape(name)}(?:{{((?:{_LABEL})*)[, ]*}}| )\s*(\S+)")
    found = []
    for match in filter(None, map(sample.match, text.splitlines())):
        labels = re.findall(_LABEL, match[1] or "")
        try:
            found.append(({key: _unescaped(value) for key, value in labels}, float(match[4])))
        except ValueError:
            continue
    return found


def _unescaped(value: str) -> str:
    return re.sub(r"\\(.)", lambda mark: "\n" if mark[1] == "n" else mark[1], value)
