"""The flags of routers that have replicas: how events come, and what replicas tell each other."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from kvflash.config import bounded_int, optional
from kvflash.errors import ConfigError
from kvflash.flags import Flags
from kvflash.servers import EVENT_PLANES, unused_server

__all__ = ["ClusterFlags", "add_cluster_flags", "settle_cluster"]


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """What the flags say; see ``--help``."""

    event_plane: str = "zmq"
    router_replica_sync: bool = False
    router_snapshot_threshold: int | None = 1_000_000
    router_reset_states: bool = False

    def check_cluster(self, *, has_discovery: bool, needs: str) -> None:
        """Check that workers and replicas can be found.

        Args:
            has_discovery: They can.
            needs: The flag that would help.

        Raises:
            ConfigError: Something is to be shared, and they can't; names both flags.
        """
        for flag, is_set in (
            ("--event-plane nats", self.event_plane == "nats"),
            ("--router-replica-sync", self.router_replica_sync),
        ):
            if is_set and not has_discovery:
                raise ConfigError(
                    f"{flag} needs {needs}: replicas find each other in discovery, and their "
                    "workers"
                )

    def without_effect(self, setting: str) -> list[str]:
        """What was set and changes nothing without NATS, each with the reason and what to add.

        Args:
            setting: What would say that events come over NATS; flags are named where it is one.
        """
        if self.event_plane == "nats":
            return []
        is_flag = setting.startswith("--")
        found = []
        for field_name, is_set, why in (
            (
                "router_reset_states",
                self.router_reset_states,
                "only a stream in NATS and its snapshot can be reset",
            ),
            (
                "router_snapshot_threshold",
                self.router_snapshot_threshold != ClusterFlags.router_snapshot_threshold,
                "snapshots are taken of a stream in NATS",
            ),
        ):
            name = f"--{field_name.replace('_', '-')}" if is_flag else field_name
            if is_set:
                found.append(f"{name} has no effect without {setting}: {why}; add {setting}")
        return found + unused_server(setting)


def add_cluster_flags(flags: Flags) -> None:
    """Add them."""
    flags.section("Replicas")
    flags.add(
        "--event-plane",
        variables=("DYN_EVENT_PLANE",),
        parse=str,
        default="zmq",
        choices=EVENT_PLANES,
        summary="How events arrive: zmq needs no server; nats uses the one in NATS_SERVER",
    )
    flags.add_toggle(
        "durable_kv_events",
        on=("--router-durable-kv-events", "--durable-kv-events"),
        off=(),
        default=False,
        variables=("DYN_ROUTER_DURABLE_KV_EVENTS", "DYN_DURABLE_KV_EVENTS"),
        summary="Deprecated; use --event-plane nats",
    )
    flags.preset("durable_kv_events", {"event_plane": "nats"})
    flags.add_toggle(
        "router_replica_sync",
        on=("--router-replica-sync",),
        off=("--no-router-replica-sync",),
        default=False,
        variables=("DYN_ROUTER_REPLICA_SYNC",),
        summary="Share load with other routers of the same workers; needs discovery",
    )
    flags.add(
        "--router-snapshot-threshold",
        variables=("DYN_ROUTER_SNAPSHOT_THRESHOLD",),
        parse=optional(bounded_int(1, 2**62)),
        default=1_000_000,
        metavar="MESSAGES",
        summary="With nats: take a snapshot when a stream is longer; None: never",
    )
    flags.add_toggle(
        "router_reset_states",
        on=("--router-reset-states",),
        off=("--no-router-reset-states",),
        default=False,
        variables=("DYN_ROUTER_RESET_STATES",),
        summary="With nats: erase the stream and its snapshot at all replicas, and start over",
    )


def settle_cluster(values: dict[str, Any]) -> dict[str, Any]:
    """What deprecated flags among ``values`` make of the others.

    Raises:
        ConfigError: Durable events where none are listened to.
    """
    values = dict(values)
    if not values.pop("durable_kv_events"):
        return values
    if not values["use_kv_events"]:
        raise ConfigError("--router-durable-kv-events requires KV events: --no-kv-events is set")
    message = "--router-durable-kv-events is deprecated: use --event-plane nats"
    warnings.warn(message, FutureWarning, stacklevel=2)
    return {**values, "event_plane": "nats"}
