"""What the runtime may hold and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RuntimeLimits"]


@dataclass(frozen=True, kw_only=True)
class RuntimeLimits:
    """Limits of one runtime, for what it serves and for what it asks.

    Attributes:
        frame_bytes_max: Largest request or item. A larger request is refused as ``invalid``, a
            larger item ends its stream with an error.
        requests_max: Requests that an endpoint serves at once; further ones are ``overloaded``.
        connections_max: Connections to this process; further ones are ``overloaded``.
        send_buffer_bytes: What may wait for a slow reader, per stream; then the handler waits.
        receive_buffer_bytes: What may wait in a client, per stream; then the sender waits.
        idle_connections_max: Connections that a client keeps per address; further ones are closed.
        client_idle_s_max: How long a client keeps an idle connection.
        server_idle_s_max: How long a server keeps an idle connection.
        connect_timeout_s: Time to connect to an instance.
        attempts_max: Instances that one request is tried at.
        suspect_s: How long an instance that failed is passed over while there are others.
        cancel_grace_s: What a handler gets to end by itself when its client is gone.
        drain_timeout_s: What running streams get when the process is to end.
        end_grace_s: What the process gets after that before the signal ends it.
        lease_ttl_s: How long what this process announced outlives it at most.
        peer_silence_s: A peer that acknowledges nothing for that long is taken for dead.
    """

    frame_bytes_max: int = 32 * 1024 * 1024
    requests_max: int = 4_096
    connections_max: int = 16_384
    send_buffer_bytes: int = 64 * 1024
    receive_buffer_bytes: int = 256 * 1024
    idle_connections_max: int = 1_024
    client_idle_s_max: float = 30.0
    server_idle_s_max: float = 60.0
    connect_timeout_s: float = 2.0
    attempts_max: int = 5
    suspect_s: float = 3.0
    cancel_grace_s: float = 1.0
    drain_timeout_s: float = 30.0
    end_grace_s: float = 10.0
    lease_ttl_s: float = 10.0
    peer_silence_s: float = 30.0
