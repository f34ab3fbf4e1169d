"""The flags of routers that have replicas: how events come, and what replicas tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from kvflash.config import Flags, bounded_int, optional
from kvflash.servers import EVENT_PLANES

__all__ = ["ClusterFlags", "add_cluster_flags"]


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """What the flags say; see ``--help``."""

    event_plane: str
    router_replica_sync: bool
    router_snapshot_threshold: int | None
    router_reset_states: bool


def add_cluster_flags(flags: Flags) -> None:
    """Add them."""
    flags.add(
        "--event-plane",
        variables=("DYN_EVENT_PLANE",),
        parse=str,
        default="zmq",
        choices=EVENT_PLANES,
        summary="how events come and what replicas tell each other: zmq needs no server; nats: "
        "events of workers that write to JetStream or publish on NATS, over the server that "
        "NATS_SERVER names",
    )
    flags.add_toggle(
        "router_replica_sync",
        on=("--router-replica-sync",),
        off=("--no-router-replica-sync",),
        default=False,
        variables=("DYN_ROUTER_REPLICA_SYNC",),
        summary="count the requests of other routers of the same workers, and tell them of one's "
        "own; needs discovery",
    )
    flags.add(
        "--router-snapshot-threshold",
        variables=("DYN_ROUTER_SNAPSHOT_THRESHOLD",),
        parse=optional(bounded_int(1, 2**62)),
        default=1_000_000,
        summary="with nats: messages in a component's stream above which a snapshot is taken; "
        "None takes none",
    )
    flags.add_toggle(
        "router_reset_states",
        on=("--router-reset-states",),
        off=("--no-router-reset-states",),
        default=False,
        variables=("DYN_ROUTER_RESET_STATES",),
        summary="with nats: forget all that the stream and its snapshot tell, here and at all "
        "replicas, and begin anew",
    )
