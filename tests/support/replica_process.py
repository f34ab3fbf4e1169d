"""A replica as a process of its own, which ends at a step that the environment names.

``KVFLASH_FAILPOINT=flipped`` makes it die there as by kill -9. It obeys lines on stdin,
``snapshot``, ``digest`` and ``stop``, and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from kvflash._core import Catalog
from kvflash.discovery import open_discovery
from kvflash.errors import KvflashError
from kvflash.servers import NatsSettings
from kvflash.state.attach import StateOptions, attach

FAILPOINT = os.environ.get("KVFLASH_FAILPOINT", "")


def on_step(name: str) -> None:
    if name == FAILPOINT:
        os._exit(137)


async def open_keys() -> Any:
    return open_discovery("etcd")


def held(catalog: Catalog) -> list[Any]:
    return [
        [i, rank, blocks, f"{digest:016x}"] for _, i, rank, blocks, digest, _ in catalog.digests()
    ]


def main() -> None:
    catalog = Catalog(max_blocks=0)
    options = StateOptions(
        snapshot_threshold=None,
        is_resetting="--reset" in sys.argv,
        lease_ttl_s=2.0,
        settings=NatsSettings.from_env(),
        on_step=on_step,
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
