"""A replica as a process of its own, which ends at a step that its command line names.

``--die-at=flipped`` makes it die there as by kill -9: each step is a line of the log, at level
debug, that ends with its name. It obeys lines on stdin,
``snapshot``, ``digest`` and ``stop``, and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from kvflash._core import Catalog
from kvflash.discovery import open_discovery
from kvflash.errors import KvflashError
from kvflash.servers import NatsSettings
from kvflash.state.attach import StateOptions, attach


class Death(logging.Handler):
    """Ends the process at a step."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self._step = step

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().endswith(f": {self._step}"):
            os._exit(137)


async def open_keys() -> Any:
    return open_discovery("etcd")


def held(catalog: Catalog) -> list[Any]:
    return [
        [i, rank, blocks, f"{digest:016x}"] for _, i, rank, blocks, digest, _ in catalog.digests()
    ]


def main() -> None:
    state = logging.getLogger("kvflash.state")
    state.setLevel(logging.DEBUG)
    for flag in sys.argv[1:]:
        if flag.startswith("--die-at="):
            state.addHandler(Death(flag.partition("=")[2]))
    catalog = Catalog(max_blocks=0)
    options = StateOptions(
        snapshot_threshold=None,
        is_resetting="--reset" in sys.argv,
        lease_ttl_s=2.0,
        settings=NatsSettings.from_env(),
    )
    service = attach(catalog, "ns", "backend", open_keys=open_keys, options=options)
    assert service.wait_ready()
    print(json.dumps({"event": "ready", "name": service.name}), flush=True)
    for line in sys.stdin:
        if line.strip() == "snapshot":
            try:
                answer: Any = service.snapshot()
            except KvflashError as error:
                answer = f"error: {error}"
        elif line.strip() == "digest":
            answer = {"held": held(catalog), "stats": service.stats()}
        else:
            break
        print(json.dumps(answer), flush=True)
    service.stop()


if __name__ == "__main__":
    main()
