"""Names of a component's streams, buckets and subjects: those of NVIDIA Dynamo's routers."""

import re

_ENDPOINT = re.compile(r"nats://(namespace\.[^./]+\.component\.[^./]+\.kv-events)/(\d+)/(\d+)")


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", name)


def _component(namespace: str, component: str) -> str:
    return f"namespace.{namespace}.component.{component}"


def stream_name(namespace: str, component: str) -> str:
    """The stream of a component's events: ``namespace-dynamo-component-backend-kv-events``."""
    return _slug(f"{_component(namespace, component)}.kv-events")


def bucket_name(namespace: str, component: str) -> str:
    """The bucket of its snapshots."""
    return _slug(f"{_component(namespace, component)}.radix-bucket")


def pointer_bucket_name(namespace: str, component: str) -> str:
    """The bucket of the key that names the current snapshot."""
    return _slug(f"{_component(namespace, component)}.radix-pointer")


def replica_sync_subject(namespace: str, component: str) -> str:
    """The subject of active requests between routers."""
    return f"{_component(namespace, component)}.active_sequences_events"


def event_subject(namespace: str, component: str) -> str:
    """The subject of events of workers with a local index."""
    return f"{_component(namespace, component)}.kv-events"


def query_subject(events: str, instance_id: int, dp_rank: int) -> str:
    """The subject of queries to a worker's local index, by that of its events."""
    return f"{events.removesuffix('.kv-events')}.worker_kv_indexer_query_dp{dp_rank}.{instance_id}"


def parse_endpoint(endpoint: str) -> tuple[str, int, int] | None:
    """Subject, instance id and rank of ``nats://SUBJECT/INSTANCE/RANK``; None for another form."""
    found = _ENDPOINT.fullmatch(endpoint)
    return found and (found[1], int(found[2]), int(found[3]))
