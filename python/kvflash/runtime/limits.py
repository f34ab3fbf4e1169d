"""The runtime's limits of sizes and times."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RuntimeLimits:
    """Limits of one runtime, for serving and for calling others.

    Attributes:
        frame_bytes_max: Largest request or item. A larger request is refused as ``invalid``, a
            larger item ends its stream with an error.
        requests_max: Requests that an endpoint serves at once; further ones are ``overloaded``.
        connections_max: Connections to this process; further ones are ``overloaded``.
        send_buffer_bytes: Data that may wait for a slow reader, per stream; beyond it the handler
            waits.
        receive_buffer_bytes: Data that may wait in a client, per stream; beyond it the sender
            waits.
        idle_connections_max: Idle connections that a client keeps per address; others are closed.
        client_idle_s_max: How long a client keeps an idle connection.
        server_idle_s_max: How long a server keeps an idle connection, and waits for the rest of a
            request.
        connect_timeout_s: Time limit for connecting to an instance.
        attempts_max: Instances tried per request.
        suspect_s: How long an instance that failed is skipped while there are others.
        cancel_grace_s: How long a handler may run on after its client has gone.
        drain_timeout_s: How long running streams may continue during a shutdown.
        end_grace_s: How long the process may take after that before the signal ends it.
        lease_ttl_s: How long this process's announcements outlive it at most.
        peer_silence_s: Time without acknowledgements after which a peer is considered dead.
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
