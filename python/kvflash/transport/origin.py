"""The publisher of a batch, and the headers in which a message names it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from kvflash._core import Catalog
from kvflash.errors import DecodeError

# The publisher, as instance/rank/epoch; the number of the batch; the index that it is for.
_PUBLISHER, _SEQUENCE, _INDEX = "Kvflash-Publisher", "Kvflash-Sequence", "Kvflash-Index"
_U32_MAX, _U64_MAX = (1 << 32) - 1, (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Origin:
    """One life of one rank of a worker."""

    instance_id: int
    dp_rank: int
    # Start time of the publisher in nanoseconds since the epoch; grows with every start.
    epoch: int
    # The index that the events are for.
    model_name: str
    block_size: int
    tenant_id: str = "default"

    @property
    def worker(self) -> tuple[int, int]:
        """Instance id and dp rank."""
        return self.instance_id, self.dp_rank

    def headers(self, sequence: int) -> dict[str, str]:
        """The headers of one batch."""
        return {
            _PUBLISHER: f"{self.instance_id}/{self.dp_rank}/{self.epoch}",
            _SEQUENCE: str(sequence),
            # ASCII only, whatever the model's name.
            _INDEX: json.dumps([self.model_name, self.tenant_id, self.block_size]),
        }

    def key(self, sequence: int) -> str:
        """Identifies a batch, so that it is stored once however often it is sent."""
        return f"{self.instance_id}-{self.dp_rank}-{self.epoch}-{sequence}"

    def register(self, catalog: Catalog, endpoint: str) -> int:
        """Register it in a catalog; returns its number there."""
        return catalog.register(
            self.instance_id,
            endpoint,
            model_name=self.model_name,
            tenant_id=self.tenant_id,
            block_size=self.block_size,
            dp_rank=self.dp_rank,
        )


def parse_headers(headers: Mapping[str, str]) -> tuple[Origin, int]:
    """A message's publisher and sequence number; DecodeError names an invalid header."""
    for name in (_PUBLISHER, _SEQUENCE, _INDEX):
        if name not in headers:
            raise DecodeError(f"header {name} is missing")
    who, index = headers[_PUBLISHER], headers[_INDEX]
    parts = who.split("/")
    if len(parts) != 3:
        raise DecodeError(f"{_PUBLISHER} must be instance/rank/epoch, got {who!r:.80}")
    instance_id, dp_rank, epoch = (_number(part, _PUBLISHER) for part in parts)
    if dp_rank > _U32_MAX:
        raise DecodeError(f"{_PUBLISHER}: rank {dp_rank} is above {_U32_MAX}")
    try:
        model_name, tenant_id, block_size = json.loads(index)
        # JSON can hold half a character ("\ud800"), which the catalog can't.
        f"{model_name}{tenant_id}".encode()
    except (ValueError, TypeError, RecursionError):
        raise DecodeError(
            f"{_INDEX} must be a valid JSON array of three, got {index!r:.80}"
        ) from None
    is_fit = isinstance(model_name, str) and isinstance(tenant_id, str)
    if not is_fit or not isinstance(block_size, int) or not 0 < block_size <= _U32_MAX:
        raise DecodeError(f"{_INDEX} must be model, tenant, block size, got {index!r:.80}")
    origin = Origin(
        instance_id=instance_id,
        dp_rank=dp_rank,
        epoch=epoch,
        model_name=model_name,
        tenant_id=tenant_id,
        block_size=block_size,
    )
    return origin, _number(headers[_SEQUENCE], _SEQUENCE)


def _number(text: str, name: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= _U64_MAX:
        return int(text)
    raise DecodeError(f"{name} must be a 64-bit number, got {text!r:.80}")
