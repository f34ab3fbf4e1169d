"""Flags of replicated routers: how events arrive, and what replicas share."""

import os
from dataclasses import dataclass

from kvflash.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """Values of these flags; see ``--help``."""

    event_plane: str = "zmq"
    router_replica_sync: bool = False
    router_snapshot_threshold: int | None = 1_000_000
    router_reset_states: bool = False

    def check_cluster(self, *, has_discovery: bool, needs: str) -> None:
        """Refuse sharing without a discovery, which the flag ``needs`` would give."""
        for flag, is_set in (
            ("--event-plane nats", self.event_plane == "nats"),
            ("--router-replica-sync", self.router_replica_sync),
        ):
            if is_set and not has_discovery:
                raise ConfigError(
                    f"{flag} needs {needs}: replicas find each other and their workers there"
                )

    def without_effect(self, setting: str, *, uses_events: bool = True) -> list[str]:
        """Settings that have no effect without NATS, each with the reason and the missing setting.

        That is ``setting``, which would select events over NATS; a flag makes the others flags too.
        """
        if self.event_plane == "nats":
            if uses_events or not self.router_reset_states:
                return []
            return ["the workers' stream is not reset: the router does not follow their events"]
        is_flag = setting.startswith("--")
        reasons = {
            "router_reset_states": "only streams and snapshots in NATS can be reset",
            "router_snapshot_threshold": "snapshots exist only for streams in NATS",
        }
        found = []
        for field_name, why in reasons.items():
            name = f"--{field_name.replace('_', '-')}" if is_flag else field_name
            if getattr(self, field_name) != getattr(ClusterFlags, field_name):
                found.append(f"{name} has no effect without {setting}: {why}; add {setting}")
        return found + unused_server(setting)


def unused_server(setting: str) -> list[str]:
    """Why ``NATS_SERVER``, if it is set, has no effect on events without ``setting``."""
    if not os.environ.get("NATS_SERVER"):
        return []
    return [
        f"NATS_SERVER has no effect on KV events without {setting}: they go from the engines' own "
        f"sockets to the routers; add {setting} to routers and workers"
    ]
