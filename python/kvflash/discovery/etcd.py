"""Discovery in etcd, over the HTTP gateway of its client port: unlike gRPC, it may be forked."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import random
import socket
import ssl
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp

from kvflash.discovery.base import LEASE_TTL_S, Discovery, Lease, Watch, check_key, new_lease_id
from kvflash.errors import ConfigError, InvalidArgumentError, KvflashError, TransportError
from kvflash.outage import Outage
from kvflash.servers import EtcdSettings, keep_alive

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
# etcd grants no shorter leases.
LEASE_TTL_S_MIN = 2
REVOKE_TIMEOUT_S = 2.0
# Pauses between attempts, doubled each time; random, so that a fleet reconnects bit by bit.
PAUSE_S = (0.1, 2.0)
# Size limit of one watch message; after a larger one the watch starts over by reading everything.
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
# A watch without messages for this long checks again: a firewall may drop its packets while the
# connection appears to be open.
SILENCE_S_MAX = 30.0
NOT_FOUND, ALREADY_THERE, DENIED, UNAUTHENTICATED = 5, 6, 7, 16


class _RefusedError(TransportError):
    """etcd answered with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"etcd: {message}")
        self.code = code


class EtcdDiscovery(Discovery):
    """Keys in etcd at ``endpoints`` (comma-separated; default ETCD_ENDPOINTS), tried in turn.

    Login and certificates are those of the settings, default the environment's; a ConfigError says
    that one is invalid.
    """

    is_local = False

    def __init__(
        self, endpoints: str | None = None, *, settings: EtcdSettings | None = None
    ) -> None:
        self._settings = settings or EtcdSettings.from_env()
        self._endpoints = self._settings.urls(endpoints)
        self._token: str | None = None
        self._turn = 0
        self._session: aiohttp.ClientSession | None = None
        self._holder: AsyncGenerator[None, None] | None = None
        # Each with the task that keeps it up.
        self._leases: dict[Lease, asyncio.Task[None]] = {}
        self._watches: dict[Watch, asyncio.Task[None]] = {}
        # The keys that were put with a lease, and its number.
        self._leased: dict[str, int] = {}
        # Those whose last attempt failed: etcd may refuse one and answer the others.
        self._away: set[Watch | Lease] = set()
        self._outage = Outage(
            logger,
            "discovery: etcd answers again",
            # Its owner may set it later.
            show=lambda reason: self.show_outage(reason),  # noqa: PLW0108
        )

    def twin(self) -> EtcdDiscovery:
        return EtcdDiscovery(",".join(self._endpoints), settings=self._settings)

    async def lease(self, ttl_s: float = LEASE_TTL_S, *, lease_id: int | None = None) -> Lease:
        """In whole seconds, at least LEASE_TTL_S_MIN."""
        self._check_open()
        lease = Lease(lease_id or new_lease_id(), self._revoke)
        ttl_s = max(LEASE_TTL_S_MIN, round(ttl_s))
        try:
            await self._call("lease/grant", {"ID": lease.id, "TTL": ttl_s})
        except _RefusedError as error:
            # The lease has outlived its reported end: it is ours.
            if error.code != ALREADY_THERE and "already exists" not in str(error):
                raise
        # If it was closed meanwhile, nothing would end the renewal; the lease expires.
        self._check_open()
        self._leases[lease] = asyncio.get_running_loop().create_task(self._keep(lease, ttl_s))
        return lease

    async def delete(self, key: str) -> bool:
        check_key(key)
        self._leased.pop(key, None)
        answer = await self._call("kv/deleterange", {"key": _text(key.encode())})
        return int(answer.get("deleted", 0)) > 0

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        return (await self._read(prefix))[0]

    def watch(self, prefix: str) -> Watch:
        self._check_open()
        watch = Watch(prefix, self._forget)
        self._watches[watch] = asyncio.get_running_loop().create_task(self._follow(watch))
        return watch

    async def close(self) -> None:
        tasks = list(self._watches.values())
        for watch in list(self._watches):
            await watch.aclose()
        # Another one may be granted meanwhile.
        while self._leases:
            lease, keeping = next(iter(self._leases.items()))
            tasks.append(keeping)
            try:
                await asyncio.wait_for(lease.revoke(), REVOKE_TIMEOUT_S)
            except (KvflashError, asyncio.TimeoutError) as error:
                logger.warning("lease %d could not be revoked and will expire: %s", lease.id, error)
        self._is_closed = True
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._holder is not None:
            await self._holder.aclose()

    async def _set(self, key: str, value: bytes, lease_id: int, *, is_new: bool) -> bool:
        # A key without a lease has lease 0 in etcd, too.
        put = {"key": _text(key.encode()), "value": _text(value), "lease": lease_id}
        absent = {"key": put["key"], "target": "CREATE", "create_revision": 0}
        try:
            if not is_new:
                await self._call("kv/put", put)
            else:
                body = {"compare": [absent], "success": [{"request_put": put}]}
                if (await self._call("kv/txn", body)).get("succeeded") is not True:
                    return False
            if lease_id:
                self._leased[key] = lease_id
            else:
                self._leased.pop(key, None)
            return True
        except _RefusedError as error:
            if error.code == NOT_FOUND:
                raise InvalidArgumentError(f"lease {lease_id} has expired") from error
            raise

    async def _revoke(self, lease: Lease) -> None:
        keeping = self._leases.pop(lease, None)
        if keeping is None:
            return
        keeping.cancel()
        self._away.discard(lease)
        self._forget_keys(lease)
        try:
            await self._call("lease/revoke", {"ID": lease.id})
        except _RefusedError as error:
            if error.code != NOT_FOUND:
                raise

    async def _keep(self, lease: Lease, ttl_s: float) -> None:
        """Renew a lease three times per TTL; only etcd knows when it has expired."""
        retry_s, retry_s_max = PAUSE_S[0], min(PAUSE_S[1], ttl_s / 10)
        pause_s = ttl_s / 3
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(pause_s)
            try:
                answer = await self._call("lease/keepalive", {"ID": lease.id})
                left_s = int(answer.get("result", {}).get("TTL", 0))
            except Exception as error:
                # Includes a refused login: it may be valid again before the lease expires.
                self._failed(lease, f"lease {lease.id} was not renewed in time", error)
                pause_s = retry_s * random.uniform(0.5, 1.0)
                retry_s = min(retry_s * 2, retry_s_max)
                continue
            self._succeeded(lease)
            retry_s, renewed_s = PAUSE_S[0], loop.time()
            # The next renewal does not wait for the keys.
            if left_s <= 0 or await self._lacks_keys(lease, ttl_s / 3):
                self._leases.pop(lease, None)
                self._forget_keys(lease)
                lease.lost.set()
                return
            pause_s = max(0.0, renewed_s + ttl_s / 3 - loop.time())

    async def _lacks_keys(self, lease: Lease, limit_s: float) -> bool:
        """Whether others, such as an operator, have deleted keys of a lease; False if unknown."""
        wanted = self._keys_of(lease)
        if not wanted:
            return False
        question = {"ID": lease.id, "keys": True}
        asking = asyncio.ensure_future(self._call("lease/timetolive", question))
        try:
            # Until Python 3.12, wait_for may swallow a cancellation.
            if not (await asyncio.wait({asking}, timeout=limit_s))[0]:
                return False
            found = {b64decode(key).decode() for key in asking.result().get("keys", [])}
        except Exception:
            # As for the renewal: nothing ends it.
            return False
        finally:
            asking.cancel()
        # This process may have deleted some meanwhile.
        return not found.issuperset(set(wanted).intersection(self._keys_of(lease)))

    def _keys_of(self, lease: Lease) -> list[str]:
        return [key for key, lease_id in self._leased.items() if lease_id == lease.id]

    def _forget_keys(self, lease: Lease) -> None:
        for key in self._keys_of(lease):
            del self._leased[key]

    async def _call(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call etcd, logged in if needed; if an address fails, try the next.

        Raises TransportError if no address can be reached, ConfigError if the login or the
        certificate is refused, _RefusedError if etcd answers with an error.
        """
        await self._log_in()
        try:
            return await self._post(method, body)
        except _RefusedError as error:
            if error.code == DENIED or "user name is empty" in str(error):
                user = self._settings.user
                who = f"user {user!r}" if user else "a client without a login"
                raise ConfigError(
                    f"etcd refuses {method} to {who} ({error}): set ETCD_AUTH_USERNAME and "
                    "ETCD_AUTH_PASSWORD to a user with read and write access to the keys"
                ) from None
            if error.code != UNAUTHENTICATED and "invalid auth token" not in str(error):
                raise
        # The token has expired, or etcd has restarted.
        self._token = None
        await self._log_in()
        return await self._post(method, body)

    def _succeeded(self, one: Watch | Lease) -> None:
        self._away.discard(one)
        if not self._away:
            self._outage.ends()

    def _failed(self, one: Watch | Lease, what: str, error: BaseException) -> None:
        """Log a failure, once for all watches and leases."""
        self._away.add(one)
        where = ",".join(self._endpoints)
        self._outage.lasts(
            f"discovery: {what}: {error}; trying again (ETCD_ENDPOINTS: {where})",
            kind=isinstance(error, ConfigError),
        )

    async def _log_in(self) -> None:
        settings = self._settings
        if settings.user is None or self._token is not None:
            return
        try:
            answer = await self._post(
                "auth/authenticate", {"name": settings.user, "password": settings.password}
            )
        except _RefusedError as error:
            raise ConfigError(
                f"etcd refuses the login of {settings.user!r} ({error}): set ETCD_AUTH_USERNAME "
                "and ETCD_AUTH_PASSWORD"
            ) from None
        self._token = str(answer["token"])

    def _headers(self) -> dict[str, str]:
        return {} if self._token is None else {"Authorization": self._token}

    async def _post(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        data, failure = json.dumps(body).encode(), KvflashError()
        for _ in self._endpoints:
            self._check_open()
            turn = self._turn
            url = self._endpoints[turn % len(self._endpoints)]
            try:
                async with (await self._opened()).post(
                    f"{url}/v3/{method}",
                    data=io.BytesIO(data),
                    headers=self._headers(),
                    timeout=timeout,
                ) as response:
                    answer: Any = await response.json(content_type=None)
                    if not isinstance(answer, dict):
                        raise ValueError(
                            f"status {response.status}, and the answer is not from etcd"
                        )
                if response.status < 500:
                    return _checked(answer, response.status)
                said = answer.get("message", response.status)
                failure = TransportError(f"etcd can't be reached: {url}: {said}")
            except _RefusedError:
                raise
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError) as error:
                failure = _failure(url, error)
            if self._turn == turn:
                # Otherwise another call has counted the failure; twice would skip an address.
                self._turn += 1
        self._check_open()
        raise failure

    async def _read(self, prefix: str) -> tuple[dict[str, bytes], int]:
        answer = await self._call("kv/range", _range(prefix))
        pairs = (_pair(entry) for entry in answer.get("kvs", []))
        return dict(pairs), int(answer["header"]["revision"])

    async def _follow(self, watch: Watch) -> None:
        prefix, pause_s = watch.prefix, PAUSE_S[0]
        while True:
            try:
                state, revision = await self._read(prefix)
                watch.replace(state)
                self._succeeded(watch)
                async for key, value in self._changes(prefix, revision + 1):
                    pause_s = PAUSE_S[0]
                    watch.change(key, value)
            except aiohttp.SocketTimeoutError:
                # No change so far.
                continue
            except Exception as error:
                # Whatever etcd or a proxy before it sends, the watch goes on.
                if self._is_closed:
                    return
                self._failed(watch, f"watch of {prefix}", error)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, PAUSE_S[1])

    async def _changes(self, prefix: str, revision: int) -> AsyncIterator[tuple[str, bytes | None]]:
        """Changes since a revision, until the connection ends."""
        url = self._endpoints[self._turn % len(self._endpoints)]
        body = {"create_request": {**_range(prefix), "start_revision": revision}}
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=REQUEST_TIMEOUT_S, sock_read=SILENCE_S_MAX
        )
        await self._log_in()
        async with (await self._opened()).post(
            f"{url}/v3/watch", json=body, headers=self._headers(), timeout=timeout
        ) as response:
            rest = bytearray()
            async for data in response.content.iter_any():
                rest += data
                *lines, tail = rest.split(b"\n")
                rest = bytearray(tail)
                if len(rest) > MESSAGE_BYTES_MAX:
                    raise TransportError(f"a message has more than {MESSAGE_BYTES_MAX} bytes")
                for line in lines:
                    result = _checked(json.loads(line), response.status).get("result", {})
                    if result.get("canceled"):
                        raise TransportError(f"etcd ended it: {result.get('cancel_reason')}")
                    for event in result.get("events", []):
                        key, value = _pair(event["kv"])
                        yield key, None if event.get("type") == "DELETE" else value
        raise TransportError(f"{url} closed the connection")

    def _forget(self, watch: Watch) -> None:
        self._watches.pop(watch).cancel()
        self._away.discard(watch)

    async def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            tls = self._settings.tls
            connector = aiohttp.TCPConnector(
                limit=0, socket_factory=_socket, ssl=tls.context("ETCD_AUTH_") if tls else True
            )
            self._session = aiohttp.ClientSession(connector=connector)
            self._holder = _hold(self._session)
            await anext(self._holder)
        return self._session


async def _hold(session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    """Hold a session until :meth:`EtcdDiscovery.close`, or else until asyncio ends its loop."""
    async with session:
        yield


def _failure(url: str, error: BaseException) -> KvflashError:
    """Why an address failed, and which setting might help."""
    failure = f"{url}: {str(error) or type(error).__name__}"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        return ConfigError(
            f"etcd at {url} has an untrusted certificate ({why}): set ETCD_AUTH_CA to the file "
            "of the CA that signed it, and use a name in ETCD_ENDPOINTS that it covers"
        )
    if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or ""):
        return ConfigError(
            f"etcd at {url} refuses TLS ({cause.reason}): set ETCD_AUTH_CLIENT_CERT and "
            "ETCD_AUTH_CLIENT_KEY to a certificate that it trusts"
        )
    # An etcd that is shutting down also fails this way.
    if isinstance(error, aiohttp.ServerDisconnectedError) and url.startswith("http://"):
        failure += "; if it wants TLS, name it https:// in ETCD_ENDPOINTS"
    if isinstance(cause, (ConnectionResetError, ssl.SSLError)) and url.startswith("https://"):
        failure += "; if it offers no TLS, name it http:// in ETCD_ENDPOINTS"
    return TransportError(f"etcd can't be reached: {failure}")


def _checked(answer: dict[str, Any], status: int) -> dict[str, Any]:
    """Return an answer that is not an error."""
    error = answer.get("error")
    if error is None and status < 400:
        return answer
    fields = error if isinstance(error, dict) else answer
    code = fields.get("grpc_code", answer.get("code", 2))
    if not isinstance(code, int):
        raise ValueError(f"status {status}, and the answer is not from etcd")
    raise _RefusedError(code, str(fields.get("message") or error))


def _range(prefix: str) -> dict[str, str]:
    """The keys with this prefix, as an etcd range."""
    first = prefix.encode()
    # UTF-8 never contains the byte 0xff, so the last byte can be incremented.
    end = first[:-1] + bytes([first[-1] + 1]) if first else b"\0"
    return {"key": _text(first or b"\0"), "range_end": _text(end)}


def _pair(entry: dict[str, str]) -> tuple[str, bytes]:
    return b64decode(entry["key"]).decode(), b64decode(entry.get("value", ""))


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _socket(info: tuple[Any, ...]) -> socket.socket:
    """A socket that detects when etcd's machine dies silently."""
    made = socket.socket(info[0], info[1], info[2])
    keep_alive(made)
    return made
