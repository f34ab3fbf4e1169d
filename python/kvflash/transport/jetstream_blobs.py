"""Snapshots in a JetStream object store, and the key that names the current one."""

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import datetime, timezone
from typing import Any

import nats.js.errors
from nats.js import JetStreamContext, api

from kvflash.errors import NotFoundError, TransportError
from kvflash.nats_login import Client, reaching
from kvflash.servers import NatsSettings
from kvflash.transport.base import Pointer

logger = logging.getLogger(__name__)

_KEY = "radix-state"
_CHUNK_BYTES = 512 * 1024
# The longest pause between two chunks.
_READ_PAUSE_S_MAX = 10.0


def _equal_chunks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in chunks of _CHUNK_BYTES; the last may be shorter."""
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        while len(buffer) >= _CHUNK_BYTES:
            yield bytes(buffer[:_CHUNK_BYTES])
            del buffer[:_CHUNK_BYTES]
    if buffer:
        yield bytes(buffer)


def _entry(name: str) -> str:
    """The last part of the subject of a blob's entry."""
    return base64.urlsafe_b64encode(name.encode()).decode()


def _name(entry: str) -> str | None:
    """The name of an entry's blob; None if the entry is not ours."""
    try:
        return base64.urlsafe_b64decode(entry).decode()
    except ValueError:
        return None


class JetStreamBlobs:
    """An object store of snapshots, and a bucket for the pointer to the current one.

    All methods raise TransportError when the server can't be reached.
    """

    def __init__(
        self, client: Client, bucket: str, pointer_bucket: str, settings: NatsSettings
    ) -> None:
        self._js: JetStreamContext = client.jetstream(timeout=5.0)
        self._client = client
        self._bucket = bucket
        self._pointer_bucket = pointer_bucket
        self._replicas = settings.replicas
        self._store: Any = None
        self._keys: Any = None

    async def ensure(self) -> None:
        """Create both if they do not exist."""
        async with reaching(f"bucket {self._bucket}"):
            try:
                self._store = await self._js.object_store(self._bucket)
            except nats.js.errors.NotFoundError:
                config = api.ObjectStoreConfig(replicas=self._replicas)
                self._store = await self._js.create_object_store(self._bucket, config)
            try:
                self._keys = await self._js.key_value(self._pointer_bucket)
            except nats.js.errors.NotFoundError:
                wanted = api.KeyValueConfig(self._pointer_bucket, replicas=self._replicas)
                self._keys = await self._js.create_key_value(wanted)

    async def put(self, name: str, chunks: Iterable[bytes]) -> str:
        """Store a blob. ``chunks`` is read in a thread. Returns its SHA-256 in hexadecimal."""
        # Not by the client's put: that names chunks at random, and those of an upload that was
        # interrupted could not be told from those of one in progress.
        pieces = _equal_chunks(chunks)
        digest, size, count = hashlib.sha256(), 0, 0
        try:
            async with reaching(f"bucket {self._bucket}"):
                while piece := await asyncio.to_thread(next, pieces, b""):
                    digest.update(piece)
                    await self._js.publish(f"$O.{self._bucket}.C.{name}", piece)
                    size, count = size + len(piece), count + 1
                info = api.ObjectInfo(
                    name=name,
                    bucket=self._bucket,
                    nuid=name,
                    size=size,
                    chunks=count,
                    mtime=datetime.now(timezone.utc).isoformat(),
                    digest=f"SHA-256={base64.urlsafe_b64encode(digest.digest()).decode()}",
                    options=api.ObjectMetaOptions(max_chunk_size=_CHUNK_BYTES),
                )
                await self._js.publish(
                    f"$O.{self._bucket}.M.{_entry(name)}",
                    json.dumps(info.as_dict()).encode(),
                    headers={api.Header.ROLLUP: "sub"},
                )
        except Exception:
            # Where even this fails, or the task is cancelled, a later snapshot deletes it.
            with contextlib.suppress(TransportError):
                await self.delete(name)
            raise
        return digest.hexdigest()

    async def read(self, name: str) -> AsyncIterator[bytes]:
        """Its chunks, in order; NotFoundError if there is no such blob or it is truncated."""
        async with reaching(f"bucket {self._bucket}"):
            try:
                info = await self._store.get_info(name)
            except nats.js.errors.NotFoundError:
                raise NotFoundError(f"snapshot {name} is not in bucket {self._bucket}") from None
            subscription = await self._js.subscribe(
                f"$O.{self._bucket}.C.{info.nuid}", ordered_consumer=True
            )
            try:
                left = info.size
                while left > 0:
                    message = await subscription.next_msg(_READ_PAUSE_S_MAX)
                    left -= len(message.data)
                    yield message.data
            except asyncio.TimeoutError:
                why = f"snapshot {name}: {left} bytes are missing"
                subject = f"$O.{self._bucket}.C.{info.nuid}"
                held = await self._js.stream_info(f"OBJ_{self._bucket}", subject)
                if (held.state.subjects or {}).get(subject, 0) >= (info.chunks or 1):
                    # Slow, or not for this account to read.
                    raise TransportError(f"{why}, although the server has them") from None
                raise NotFoundError(why) from None
            finally:
                await subscription.unsubscribe()

    async def has(self, name: str) -> bool:
        """Whether there is such a blob."""
        async with reaching(f"bucket {self._bucket}"):
            try:
                await self._store.get_info(name)
            except nats.js.errors.NotFoundError:
                return False
        return True

    async def names(self) -> list[str]:
        """Names of all blobs, also of those whose upload did not end."""
        prefix = f"$O.{self._bucket}."
        async with reaching(f"bucket {self._bucket}"):
            try:
                info = await self._js.stream_info(f"OBJ_{self._bucket}", f"{prefix}>")
            except nats.js.errors.NotFoundError:
                return []
        found = [subject[len(prefix) :].split(".", 1) for subject in info.state.subjects or ()]
        names = {name if kind == "C" else _name(name) for kind, name in found}
        return sorted(name for name in names if name is not None)

    async def delete(self, name: str) -> None:
        """Delete a blob; no error if it does not exist."""
        async with reaching(f"bucket {self._bucket}"):
            with contextlib.suppress(nats.js.errors.NotFoundError):
                subjects = [f"M.{_entry(name)}", f"C.{name}"]
                with contextlib.suppress(
                    nats.js.errors.NotFoundError, nats.js.errors.BadObjectMetaError
                ):
                    # Also one that the client marked as deleted: its mark would stay for ever.
                    info = await self._store.get_info(name, show_deleted=True)
                    if info.nuid != name:
                        # A replica of an older version stored it: only the entry names the chunks.
                        subjects.insert(0, f"C.{info.nuid}")
                for subject in subjects:
                    await self._js.purge_stream(
                        f"OBJ_{self._bucket}", subject=f"$O.{self._bucket}.{subject}"
                    )

    async def pointer(self) -> tuple[Pointer | None, int]:
        """The pointer and its revision, which is 0 if there never was a pointer."""
        async with reaching(f"bucket {self._pointer_bucket}"):
            try:
                entry = await self._keys.get(_KEY)
            except nats.js.errors.KeyNotFoundError as error:
                # A deleted key has a revision, which the next flip must name.
                return None, error.entry.revision if error.entry is not None else 0
        try:
            return Pointer(**json.loads(entry.value)), entry.revision
        except (ValueError, TypeError) as error:
            logger.error("the snapshot pointer is invalid: %s; ignoring it", error)
            return None, entry.revision

    async def flip(self, pointer: Pointer, revision: int) -> bool:
        """Set the pointer if its revision is unchanged; False otherwise."""
        value = json.dumps(dataclasses.asdict(pointer)).encode()
        async with reaching(f"bucket {self._pointer_bucket}"):
            try:
                await self._keys.update(_KEY, value, last=revision)
            except nats.js.errors.KeyWrongLastSequenceError:
                return False
        return True
