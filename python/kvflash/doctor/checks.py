"""Checks as pure functions: they turn answers into findings."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from kvflash.ask import Answer, samples
from kvflash.console import counted
from kvflash.doctor.events import Contents, Heard, Replayed
from kvflash.doctor.finding import OK, Finding, fail, ok, warn
from kvflash.transport.zmq_socket import dialable

#: Clocks further apart than this are reported; the Date header has whole seconds.
CLOCK_S_MAX = 5.0
#: Share of its limit above which an index is called nearly full; it evicts from 15/16 on.
FULL_SHARE = 0.9
#: Batches that the indexer may be behind what this process received.
LAG_BATCHES_MAX = 100

# The check that a reason belongs to, and the check's name when there is no reason.
_CHECKS = {
    "connected": "failed never_connected disconnected paused",
    "publishes": "no_events_yet",
    "decodes": "nothing_decodable undecodable malformed_events unknown_events unknown_medium",
    "block size": "block_size_mismatch mixed_block_sizes",
    "complete": (
        "catching_up missed_first_batches lost_batches unverified_reconnect "
        "recovered_without_watermark recovered_inexact orphaned_stores"
    ),
    "consistent": "self_parent identity_conflict hash_reused shared_socket",
    "room": "refused_blocks evicted_by_limit",
    "capacity": "over_capacity",
}
_CHECK_OF = {code: check for check, codes in _CHECKS.items() for code in codes.split()}
# Codes that make a worker stale: none of its blocks can be relied on.
_STALE = {*_CHECKS["connected"].split(), "block_size_mismatch", "nothing_decodable"}
#: The fix for a worker that is healthy for its service and does not answer this host.
ELSEWHERE = "the worker is not reachable from this host: run the doctor on the service's host"
_NTP = "let both hosts take their time from the same NTP servers"
# By the code that GET /ready gives.
_UNREADY = {
    "starting": "start the missing workers, or lower --min-initial-workers: every request is "
    "refused until then",
    "no_decode_worker": "see its workers below: every request is refused until one is healthy",
    "all_draining": "kvflash workers resume URL ID brings one back: requests are refused until "
    "then",
    "no_prefill_worker": "start or repair a prefill worker, or set --enforce-disagg off: requests "
    "are refused until then",
    "full": "wait until requests end, raise the limit, or start another "
    "frontend: further requests are refused until then",
    "stopping": "start it again, or send requests to another one: new requests are refused "
    "after --lame-duck-timeout",
}


@dataclass(frozen=True, kw_only=True)
class Listener:
    """One event socket of an indexer or a frontend, as listed by its GET /workers."""

    indexer: str
    instance: int
    rank: int
    model: str
    tenant: str
    block_size: int | None
    entry: dict[str, Any]
    is_one_of_several: bool = False
    # For messages: whose listener it is, and how that is given the two sockets.
    service: str = "the indexer"
    events_setting: str = "endpoint in POST /register"
    replay_setting: str = "replay_endpoint in POST /register"

    @property
    def subject(self) -> str:
        """Its name in findings, with model and tenant if its instance is registered for several."""
        name = f"{self.indexer} worker {self.instance}:{self.rank}"
        return f"{name} of {self.model}:{self.tenant}" if self.is_one_of_several else name

    @property
    def endpoint(self) -> str:
        """Its event socket."""
        return str(self.entry.get("endpoint", ""))

    @property
    def has_socket(self) -> bool:
        """Whether events come from a socket of the engine; those over NATS need no replay."""
        return not self.endpoint.startswith(("nats://", "jetstream://"))

    def fits_block_size(self, reported: int | None) -> bool:
        """Whether an engine that reports this size may publish what the index has.

        With context parallelism it publishes blocks of several times that size.
        """
        if reported is None or reported < 1:
            return True
        return (self.block_size or 0) % reported == 0

    @property
    def replay_endpoint(self) -> str | None:
        """Its replay socket."""
        endpoint = self.entry.get("replay_endpoint")
        return str(endpoint) if endpoint else None

    @property
    def last_sequence(self) -> int | None:
        """The last batch that its service applied."""
        number = self.entry.get("last_sequence")
        return number if isinstance(number, int) else None


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What an engine reports about itself; None where it reports nothing."""

    url: str
    models: tuple[str, ...]
    block_size: int | None = None
    capacity_blocks: int | None = None
    has_prefix_caching: bool | None = None
    hash_algorithm: str | None = None


def listeners_of(url: str, workers: Any) -> list[Listener]:
    """The event sockets in an answer of GET /workers."""
    found = []
    for worker in workers if isinstance(workers, list) else []:
        for rank, entry in dict(worker.get("listeners") or {}).items():
            size = worker.get("block_size")
            listener = Listener(
                indexer=url,
                instance=int(worker["instance_id"]),
                rank=int(rank),
                model=str(worker.get("model_name", "")),
                tenant=str(worker.get("tenant_id", "")),
                block_size=size if isinstance(size, int) else None,
                entry=dict(entry),
            )
            found.append(listener)
    counts = Counter((one.instance, one.rank) for one in found)
    return [replace(e, is_one_of_several=counts[e.instance, e.rank] > 1) for e in found]


def check_clock(subject: str, skew_s: float | None) -> Iterator[Finding]:
    """Compare a service's clock with ours."""
    if skew_s is None:
        return
    if abs(skew_s) > CLOCK_S_MAX:
        side = "ahead of" if skew_s > 0 else "behind"
        yield warn(subject, "clock", f"its clock is {abs(skew_s):.0f} s {side} this host's", _NTP)
    else:
        yield ok(subject, "clock", "as this host's")


def check_ready(url: str, ready: Answer, otherwise: str) -> Iterator[Finding]:
    """Judge an answer of GET /ready; ``otherwise`` is the fix if its code does not imply one."""
    if ready.status == 200:
        yield ok(url, "ready", "yes")
        return
    code, reason = str(ready.fields.get("code") or ""), ready.fields.get("reason") or ready.said
    if ready.status != 503:
        otherwise = ready.fix or "the message says why"
    yield fail(url, "ready", f"GET /ready: {reason}", _UNREADY.get(code, otherwise), code)


def causes_of(health: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The warnings of GET /health; services of an older version give them only as text."""
    if "causes" not in health:
        return [{"message": text} for text in health.get("warnings") or []]
    return [cause for cause in health["causes"] or [] if isinstance(cause, dict)]


def check_indexer(
    url: str, health: Answer, ready: Answer, metrics: Answer, listeners: Sequence[Listener]
) -> Iterator[Finding]:
    """Check an indexer on its own."""
    if health.status == 200:
        yield ok(url, "reachable", f"an indexer, answered in {health.seconds * 1000:.0f} ms")
    else:
        yield fail(url, "reachable", f"GET /health: {health.said}", "look into its log, restart it")
    for cause in causes_of(health.fields):
        fix = str(cause.get("fix") or "look into its log")
        yield warn(url, "warnings", str(cause.get("message")), fix, str(cause.get("code") or ""))
    yield from check_clock(url, health.skew_s)
    wait = "wait until it has recovered and its workers have registered; the answer lists them"
    yield from check_ready(url, ready, wait)
    if listeners:
        models = {(listener.model, listener.tenant) for listener in listeners}
        sockets = counted(len(listeners), "event socket", "event sockets")
        yield ok(url, "workers", f"{sockets}, {counted(len(models), 'model', 'models')}")
    else:
        how = "POST /register each engine, or start the indexer with --workers"
        yield fail(url, "workers", "no worker is registered: every query finds nothing", how)
    yield from _check_metrics(url, metrics)


def _check_metrics(url: str, metrics: Answer) -> Iterator[Finding]:
    if metrics.status != 200:
        yield warn(url, "metrics", f"GET /metrics: {metrics.said}", "look into its log")
        return
    prefix = "kvflash_kvindexer_"
    limits = samples(metrics.text, prefix + "index_limit_bytes")
    limit = limits[0][1] if limits else 0.0
    for labels, used in samples(metrics.text, prefix + "index_bytes"):
        if limit and used >= FULL_SHARE * limit:
            name = f"model {labels.get('model')} tenant {labels.get('tenant')}"
            seen = f"the index of {name} has {used / limit:.0%} of --index-memory"
            yield warn(url, "memory", seen, "raise --index-memory, or run more indexers")
            break
    else:
        yield ok(url, "memory", "no index is near its limit" if limit else "no limit is set")
    errors = samples(metrics.text, prefix + "errors_total")
    # GET /ready answers 503 while the indexer waits for something: not a fault.
    failed = sum(
        count
        for labels, count in errors
        if labels.get("status_class") == "5xx" and labels.get("endpoint") != "/ready"
    )
    if failed:
        how = "fewer /dump and /digest at a time: four are answered; report anything else"
        seen = counted(int(failed), "request was answered", "requests were answered")
        yield warn(url, "errors", f"{seen} 5xx", how)


def check_listener(
    listener: Listener, replayed: Replayed | None, heard: Heard | None, timeout_s: float
) -> list[Finding]:
    """Check one event socket: its service's knowledge of it, and its own answers."""
    found = [*_check_trust(listener), *check_replay(listener, replayed, timeout_s)]
    if heard is not None:
        found += check_heard(listener, heard)
    # A message of a replay socket that is not a batch is reported above.
    if replayed is not None and replayed.contents.batches:
        found += _check_contents(listener, replayed.contents)
    if heard is not None:
        found += _check_contents(listener, heard.contents)
    return list(_without_repetition(found))


def _without_repetition(found: list[Finding]) -> Iterator[Finding]:
    """Only the first bad finding of a check, unless they have codes; ok only if none is bad."""
    bad = {finding.check for finding in found if finding.level != OK}
    seen: set[object] = set()
    for finding in found:
        with_code = (finding.check, finding.code)
        is_repeated = (with_code if finding.code else finding.check) in seen
        if not is_repeated and (finding.level != OK) == (finding.check in bad):
            seen |= {finding.check, with_code}
            yield finding


def _check_trust(listener: Listener) -> Iterator[Finding]:
    entry, subject = listener.entry, listener.subject
    trust = entry.get("trust")
    if not isinstance(trust, dict):
        if entry.get("status") != "active":
            seen = f"{entry.get('status')}: {entry.get('last_error')}"
            yield fail(subject, "connected", seen, "check the endpoint and that the engine runs")
        seen = f"{listener.service} reports no trust state"
        yield warn(subject, "trust", seen, f"upgrade {listener.service}")
        return
    reasons = trust.get("reasons") or []
    for reason in reasons:
        code, seen, fix = (str(reason.get(name)) for name in ("code", "message", "fix"))
        judge = fail if code in _STALE else warn
        yield judge(subject, _CHECK_OF.get(code, "trust"), seen, fix, code)
    if not reasons:
        yield ok(subject, "trust", str(trust.get("state")))
    age_ms, count = entry.get("last_event_age_ms"), (entry.get("events") or {}).get("batches")
    heard = "nothing came yet"
    if age_ms is not None:
        heard = f"{counted(count, 'batch', 'batches')}, the last one {age_ms / 1000:.0f} s ago"
    yield ok(subject, "connected", f"to {listener.endpoint}")
    yield ok(subject, "publishes", heard)
    if age_ms is not None:
        yield ok(subject, "decodes", "all that came")
        yield ok(subject, "block size", f"{listener.block_size} tokens")
        yield ok(subject, "complete", "nothing is missing")


def check_replay(
    listener: Listener, replayed: Replayed | None, timeout_s: float, unreached: str = ""
) -> Iterator[Finding]:
    """Check the answer of a replay socket.

    ``unreached`` says why its engine, healthy for the service, gave this host no HTTP answer.
    """
    subject, endpoint, last = listener.subject, listener.replay_endpoint, listener.last_sequence
    if not listener.has_socket:
        return
    if endpoint is None or replayed is None:
        yield warn(
            subject,
            "replay",
            "no replay_endpoint: lost batches cannot be recovered, and a restart may go unnoticed",
            'add "replay_endpoint": "tcp://*:PORT" to the engine\'s --kv-events-config, and give '
            f"that socket as {listener.replay_setting}",
        )
        return
    reach = (
        f"check that {endpoint} is the replay_endpoint of the engine's --kv-events-config and "
        "that its port is open to this host"
    )
    if replayed.error:
        yield fail(subject, "replay", f"{endpoint} cannot be used: {replayed.error}", reach)
    elif not replayed.has_answered and unreached:
        seen = f"{endpoint} did not answer in {timeout_s:g} s, nor did its engine: {unreached}"
        yield warn(subject, "replay", seen, ELSEWHERE)
    elif not replayed.has_answered:
        yield fail(subject, "replay", f"{endpoint} did not answer in {timeout_s:g} s", reach)
    elif replayed.contents.undecodable:
        seen = f"{endpoint} answered with something other than batches: {replayed.contents.fault}"
        yield fail(subject, "replay", seen, reach)
    elif last is None:
        yield ok(subject, "replay", f"{endpoint} answers")
    elif replayed.first is None:
        seen = f"{endpoint} has nothing from batch {last} on, which {listener.service} has applied"
        how = "it is another engine's or rank's socket, or the engine restarted: correct the port"
        yield fail(subject, "replay", seen, how)
    elif replayed.first > last + 1:
        seen = f"the ring begins at batch {replayed.first}, {listener.service} is at {last}"
        yield warn(subject, "replay", seen, "a larger buffer_steps in --kv-events-config")
    else:
        yield ok(subject, "replay", f"{endpoint} answers, and its ring covers batch {last}")


def check_heard(listener: Listener, heard: Heard) -> Iterator[Finding]:
    """Check what an event socket sent while this process listened."""
    subject, endpoint = listener.subject, listener.endpoint
    if heard.error:
        seen = f"{endpoint} cannot be used from here: {heard.error}"
        how = f"check {listener.events_setting}"
        yield fail(subject, "listened", seen, how)
    elif not heard.is_connected:
        seen = f"{endpoint} did not accept a subscription"
        how = f"check {listener.events_setting}, and that its port is open to this host"
        yield warn(subject, "listened", seen, how)
    elif not heard.messages:
        # Events come only when blocks are stored or removed: "publishes" judges engines at work.
        seen = f"no event from {endpoint}, as is normal for an idle engine; to test it, send it a "
        yield ok(subject, "listened", seen + "new prompt while the doctor listens")
    elif heard.malformed:
        seen = f"{heard.malformed} of {heard.messages} messages have no sequence number"
        how = f"it is not a KV event socket: correct {listener.events_setting}"
        yield fail(subject, "listened", seen, how)
    elif heard.holes:
        missing = counted(heard.holes, "batch is missing", "batches are missing")
        seen = f"{missing} between {heard.first} and {heard.last}"
        how = "a larger hwm in the engine's --kv-events-config, and a replay_endpoint"
        yield warn(subject, "listened", seen, how)
    else:
        batches = counted(heard.messages, "batch", "batches")
        yield ok(subject, "listened", f"{batches}, {heard.first} to {heard.last}")
    if heard.last is not None:
        behind = heard.last - (listener.last_sequence if listener.last_sequence is not None else -1)
        if behind > LAG_BATCHES_MAX:
            seen = f"{listener.service} is {behind} batches behind what was heard here"
            how = "look at its CPU and at `status`; more --threads, fewer engines"
            yield warn(subject, "lag", seen, how)
    yield from check_clock(subject, heard.skew_s)


def _check_contents(listener: Listener, contents: Contents) -> Iterator[Finding]:
    subject, size = listener.subject, listener.block_size
    if contents.undecodable:
        seen = f"a message is not an event batch: {contents.fault}"
        yield fail(subject, "decodes", seen, "report engine and version")
    others = sorted(contents.block_sizes - {size})
    if size is not None and others:
        seen = f"its events have blocks of {others[0]} tokens, the index of {size}"
        how = "the same --block-size for the engine and its registration"
        yield fail(subject, "block size", seen, how)
    stored = contents.stored
    events = counted(stored, "stored event", "stored events")
    if contents.numbered_adapters:
        have = "has" if contents.numbered_adapters == 1 else "have"
        seen = f"{contents.numbered_adapters} of {events} {have} a lora_id only"
        how = "a newer engine: blocks without their adapter's name match no query"
        yield warn(subject, "identity", seen, how)
    elif stored:
        named, salted = contents.named_adapters, contents.salted
        seen = f"of {events} {named} have an adapter, {salted} a cache salt"
        yield ok(subject, "identity", seen)


def engine_of(url: str, models: Answer, metrics: Answer) -> Engine:
    """An engine's answers to GET /v1/models and GET /metrics."""
    cards = models.fields.get("data")
    cards = cards if isinstance(cards, list) else []
    names = tuple(str(card["id"]) for card in cards if isinstance(card, dict) and "id" in card)
    rows = [labels for labels, _ in samples(metrics.text, "vllm:cache_config_info")]
    if metrics.status != 200 or not rows:
        return Engine(url=url, models=names)

    def number(name: str) -> int | None:
        found = [int(row[name]) for row in rows if row.get(name, "").isdecimal()]
        return max(found, default=None)

    caching = {"True": True, "False": False}.get(rows[0].get("enable_prefix_caching", ""))
    return Engine(
        url=url,
        models=names,
        block_size=number("block_size"),
        capacity_blocks=number("num_gpu_blocks"),
        has_prefix_caching=caching,
        hash_algorithm=rows[0].get("prefix_caching_hash_algo"),
    )


def check_engine(engine: Engine, models: Answer, metrics: Answer) -> Iterator[Finding]:
    """Check an engine on its own."""
    url = engine.url
    if models.status != 200:
        how = "set KVFLASH_WORKER_API_KEY to the engine's API key"
        yield fail(url, "reachable", f"GET /v1/models: {models.said}", how)
        return
    served = ", ".join(engine.models[:5]) or "no model"
    yield ok(url, "reachable", f"an engine that serves {served}")
    yield from check_clock(url, models.skew_s)
    if engine.block_size is None:
        seen = f"GET /metrics ({metrics.said[:60]}) does not tell the shape of the cache"
        how = "compare block size and prefix caching by hand; vLLM reports them, SGLang does not"
        yield warn(url, "cache", seen, how)
        return
    yield ok(url, "cache", f"{engine.capacity_blocks} blocks of {engine.block_size} tokens")
    if engine.has_prefix_caching is False:
        seen = "off: the engine reuses nothing and publishes no events"
        yield fail(url, "prefix caching", seen, "start it with --enable-prefix-caching")
    elif engine.has_prefix_caching:
        yield ok(url, "prefix caching", "on")
    if engine.hash_algorithm == "builtin":
        seen = "Python's built-in hash: prompts that collide share blocks"
        yield warn(url, "hashes", seen, "start it with --prefix-caching-hash-algo sha256")
    elif engine.hash_algorithm:
        seen = f"{engine.hash_algorithm}; PYTHONHASHSEED need not be set, names are not compared"
        yield ok(url, "hashes", seen)


def check_pairs(engines: Sequence[Engine], listeners: Sequence[Listener]) -> Iterator[Finding]:
    """Compare engines with the publishers that indexers have registered."""
    for engine in engines:
        of_host = [entry for entry in listeners if _host(entry.endpoint) == _host(engine.url)]
        of_model = [entry for entry in listeners if entry.model in engine.models]
        if not of_model:
            served = ", ".join(engine.models[:3])
            if of_host:
                known = ", ".join(sorted({entry.model for entry in of_host}))
                seen = f"it serves {served}, its host is registered as {known}: queries by the "
                how = "register it under the name that clients use, or query by that name"
                yield warn(engine.url, "registered", seen + "served name find nothing", how)
            else:
                seen = f"no indexer has a worker of {served}"
                how = "POST /register it with its event endpoint"
                yield fail(engine.url, "registered", seen, how)
        else:
            sockets = counted(len(of_model), "event socket", "event sockets")
            yield ok(engine.url, "registered", f"{sockets} of its model")
        paired = of_model or of_host
        own = engine.block_size
        odd = [entry.block_size or 0 for entry in paired if not entry.fits_block_size(own)]
        if odd:
            seen = f"the engine has {own} tokens, the index {min(odd)}"
            how = "the same --block-size for the engine and its registration"
            yield fail(engine.url, "block size", seen, how)
        of_both = [entry for entry in of_host if entry in paired]
        neighbours = [other for other in engines if _host(other.url) == _host(engine.url)]
        if len(neighbours) == 1 and len({e.instance for e in of_both}) == 1:
            yield from _check_capacity(engine, of_both)


def _check_capacity(engine: Engine, listeners: Sequence[Listener]) -> Iterator[Finding]:
    for listener in listeners:
        held, told = listener.entry.get("device_blocks"), listener.entry.get("capacity_blocks")
        capacity = engine.capacity_blocks
        if capacity is None or not isinstance(held, int):
            continue
        if held > capacity:
            seen = f"{held} blocks are credited, the engine has {capacity}: removals were missed"
            how = "clear the engine's cache or restart it; register it with its replay_endpoint"
            yield fail(listener.subject, "engine capacity", seen, how)
        elif told is not None and told != capacity:
            seen = f"registered with capacity_blocks {told}, the engine has {capacity}"
            how = "register it with the engine's value"
            yield warn(listener.subject, "engine capacity", seen, how)
        else:
            yield ok(listener.subject, "engine capacity", f"{held} of {capacity} blocks are known")


def _host(address: str) -> str:
    """The host of a URL or endpoint; all names of this host are treated as one."""
    dialed = dialable(address)
    if dialed.startswith(("ipc://", "inproc://")):
        return "127.0.0.1"
    try:
        host = urlsplit(dialed).hostname or ""
    except ValueError:
        host = ""
    return "127.0.0.1" if host in ("localhost", "::1", "0.0.0.0") else host
