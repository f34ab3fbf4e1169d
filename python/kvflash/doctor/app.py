"""Queries services, checks their answers, and prints findings; the exit status sums them up."""

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from kvflash.ask import (
    KEY_FILE,
    Answer,
    add_key_file,
    add_timeout,
    ask,
    checked_key,
    parse_url,
    read_key,
)
from kvflash.config import bounded_float
from kvflash.console import counted, program, refuse
from kvflash.doctor import checks, workers
from kvflash.doctor.checks import Engine, Listener
from kvflash.doctor.events import NOWHERE, SOCKETS_MAX, Heard, Replayed, ask_replays, listen
from kvflash.doctor.finding import FAIL, OK, WARN, Finding, fail, ok, warn
from kvflash.errors import ConfigError, KvflashError
from kvflash.flags import Flags
from kvflash.table import printable

_PARALLEL = 16
#: Maximum number of URLs in one call.
MAX_URLS = 1_000


@dataclass(frozen=True, kw_only=True)
class _Place:
    url: str
    workers: Answer
    models: Answer
    health: Answer | None = None  # Of a service that shows its workers.

    @property
    def kind(self) -> str:
        """What answers: ``indexer``, ``frontend``, ``router``, ``engine`` or ``other``.

        ``locked`` is a service that does not show its workers, ``unreachable`` one without answer.
        """
        has_models = self.models.status == 200 and "data" in self.models.fields
        if self.health is not None:
            # An indexer is the only service that has workers but makes no decisions.
            decides = "router_policy" in self.health.fields
            return "frontend" if has_models else "router" if decides else "indexer"
        if self.workers.refused:
            return "locked"
        if has_models or self.models.status in (401, 403):
            return "engine"
        return "other" if self.workers.status or self.models.status else "unreachable"


def main(argv: Sequence[str] | None = None) -> int:
    """Check and report. Returns the exit status."""
    try:
        args = parse_args(argv)
    except KvflashError as error:
        return refuse("doctor", error, failure=2)
    try:
        findings = list(_Doctor(args).findings())
    except KeyboardInterrupt:
        print(f"{program('doctor')}: interrupted", file=sys.stderr)
        return 130
    levels = [finding.level for finding in findings]
    is_bad = FAIL in levels or (args.is_strict and WARN in levels)
    try:
        _print(findings, is_json=args.is_json, status=int(is_bad))
    except BrokenPipeError:
        # The reader of the report has closed the pipe.
        sys.stderr.close()
    return int(is_bad)


def parse_args(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the command line and the environment."""
    flags = Flags(
        "doctor",
        "Check frontends, indexers and engines: what is wrong, and what to do about it. Exit "
        "status: 0 all is well, 1 failures, 2 bad usage.",
    )
    flags.add_positionals(
        "urls",
        metavar="URL",
        summary="A frontend, a router, an indexer or an engine; the doctor finds out which",
    )
    flags.add(
        "--listen",
        parse=bounded_float(0, 3_600),
        default=0.0,
        metavar="SECONDS",
        summary="Listen to the workers' event sockets for so long; 0: do not",
    )
    add_timeout(flags)
    flags.add_toggle("is_json", on=["--json"], summary="Print one JSON object")
    flags.add_toggle("is_strict", on=["--strict"], summary="Treat warnings as failures")
    flags.add(
        "--worker-api-key-file",
        metavar="FILE",
        summary="File with the key for engines, else KVFLASH_WORKER_API_KEY",
    )
    add_key_file(flags)
    args = flags.parse(argv)
    urls = tuple(dict.fromkeys(parse_url(text) for text in args.urls))
    if len(urls) > MAX_URLS:
        raise ConfigError(f"at most {MAX_URLS} URLs may be given, got {len(urls)}")
    args.urls = urls
    # Not a flag: every user of the machine can read a command line.
    if args.worker_api_key_file is not None:
        args.worker_api_key = read_key(args.worker_api_key_file, "--worker-api-key-file")
    else:
        text = os.environ.get("KVFLASH_WORKER_API_KEY", "")
        args.worker_api_key = checked_key(text, "environment variable KVFLASH_WORKER_API_KEY")
    args.service_key = read_key(args.service_key_file)
    return args


class _Doctor:
    def __init__(self, args: Namespace) -> None:
        self._args = args
        # Services that take a key; engines must not see it.
        self._locked = set[str]()

    def findings(self) -> Iterator[Finding]:
        """All findings, place by place, in the order of the command line."""
        with ThreadPoolExecutor(_PARALLEL) as pool:
            places = list(pool.map(self._meet, self._args.urls))
        kinds = {place.kind for place in places}
        heard: dict[str, Heard] = {}
        if self._args.listen and kinds & {"indexer", "frontend"}:
            known = [entry for place in places for entry in self._known(place)]
            yield from self._listen(known, heard)
        engines: list[Engine] = []
        listeners: list[Listener] = []
        for place in places:
            if place.kind == "indexer":
                found = self._indexer(place.url, listeners, heard)
            elif place.kind == "engine":
                found = self._engine(place, engines)
            elif place.kind == "frontend":
                found = self._frontend(place, heard)
            else:
                found = self._other(place)
            yield from self._guarded(place.url, found)
        if "indexer" in kinds:
            pairs = checks.check_pairs(engines, listeners)
            yield from self._guarded("engines and indexers", pairs)

    @staticmethod
    def _guarded(subject: str, found: Iterable[Finding]) -> Iterator[Finding]:
        """Answers of other services are untrusted: a fault in one ends only its own check."""
        try:
            yield from found
        except Exception as error:
            seen = f"the check failed: {type(error).__name__}: {error}"
            how = "unexpected answer: upgrade the service or kvflash, or report this line"
            yield fail(subject, "answers", seen, how)

    def _ask(self, url: str, path: str, *, with_key: bool = False, body: Any = None) -> Answer:
        key = self._args.worker_api_key if with_key else None
        if url in self._locked:
            key = self._args.service_key
        return ask(url, path, timeout_s=self._args.timeout, api_key=key, body=body)

    def _meet(self, url: str) -> _Place:
        workers = self._ask(url, "/workers")
        if workers.status in (401, 403) and self._args.service_key is not None:
            self._locked.add(url)
            workers = self._ask(url, "/workers")
        # A service that does not answer at all is not waited for twice.
        models = self._ask(url, "/v1/models", with_key=True) if workers.status else workers
        is_ours = workers.status == 200 and isinstance(workers.json, list)
        health = self._ask(url, "/health") if is_ours else None
        return _Place(url=url, workers=workers, models=models, health=health)

    @staticmethod
    def _known(place: _Place) -> list[Listener]:
        try:
            if place.kind == "frontend":
                known = workers.workers_of(place.url, place.workers.json)
                return [listener for worker in known for listener in worker.listeners]
            is_indexer = place.kind == "indexer"
            return checks.listeners_of(place.url, place.workers.json) if is_indexer else []
        except Exception:
            # The same answer is judged and reported when its indexer is checked.
            return []

    def _listen(self, known: Sequence[Listener], heard: dict[str, Heard]) -> Iterator[Finding]:
        endpoints = list(dict.fromkeys(entry.endpoint for entry in known if entry.has_socket))
        heard.update(zip(endpoints, listen(endpoints, self._args.listen), strict=False))
        if len(endpoints) > SOCKETS_MAX:
            seen = f"listened at {SOCKETS_MAX} of {len(endpoints)} event sockets"
            yield warn("event sockets", "listened", seen, "ask about fewer URLs at a time")

    def _indexer(
        self, url: str, listeners: list[Listener], heard: dict[str, Heard]
    ) -> Iterator[Finding]:
        health, ready = self._ask(url, "/health"), self._ask(url, "/ready")
        # Read again: it must include events that came while we listened.
        workers, metrics = self._ask(url, "/workers"), self._ask(url, "/metrics")
        own = checks.listeners_of(url, workers.json)
        listeners += own
        yield from checks.check_indexer(url, health, ready, metrics, own)
        for listener, replayed in zip(own, self._replays(own), strict=True):
            received = heard.get(listener.endpoint)
            yield from checks.check_listener(listener, replayed, received, self._args.timeout)

    def _frontend(self, place: _Place, heard: dict[str, Heard]) -> Iterator[Finding]:
        url = place.url
        # Read again: it must include events that came while we listened.
        known = workers.workers_of(url, self._ask(url, "/workers").json)
        health = self._ask(url, "/health")
        yield from self._routing(url, "a kvflash frontend", health, known)
        told = health.fields
        if known:
            how = "the reason says what is missing: requests are refused until then"
            yield from checks.check_ready(url, self._ask(url, "/ready"), how)
        yield from workers.check_parity(url, told)
        if not known:
            how = (
                "POST /workers, or start the frontend with --worker or --discovery, or register "
                "workers where its --discovery looks"
            )
            if checks.causes_of(told):
                # It may have been: DNS or discovery can have lost the workers since.
                how = f"remove the cause that a warning above names; without one, {how}"
            yield fail(url, "workers", "no worker is registered: every request is refused", how)
        of_workers = [listener for worker in known for listener in worker.listeners]
        answers = zip(of_workers, self._replays(of_workers), strict=True)
        replays = {(e.instance, e.rank): answer for e, answer in answers if answer is not None}
        tokens: dict[str, Answer] = {}
        for worker in known:
            # First: an engine that does not answer this host explains why its sockets do not.
            engine = None
            if worker.is_http and worker.entry.get("healthy"):
                asked = {"model": worker.model, "prompt": workers.SAMPLE_TEXT}
                engine = self._ask(worker.url, "/tokenize", with_key=True, body=asked)
            # With a fix its port did answer, though not to this question.
            unreached = engine.error if engine and not engine.fix else ""
            yield from workers.check_worker(
                worker, told, replays, heard, self._args.timeout, unreached=unreached
            )
            if engine and worker.model and not worker.is_prefill:
                if worker.model not in tokens:
                    tokens[worker.model] = self._tokens(url, worker.model)
                yield from workers.check_tokens(worker, tokens[worker.model], engine)

    def _tokens(self, url: str, model: str) -> Answer:
        """The frontend's answer with its tokens of a text; it sends nothing to an engine."""
        nvext = {"annotations": ["query_instance_id:"]}
        body = {"model": model, "prompt": workers.SAMPLE_TEXT, "nvext": nvext}
        return self._ask(url, "/v1/completions", body=body)

    def _replays(self, listeners: Sequence[Listener]) -> list[Replayed | None]:
        """The answer of each listener's replay socket; None for one without such a socket."""
        asked = [entry for entry in listeners if entry.replay_endpoint is not None]
        targets = [
            (str(e.replay_endpoint), NOWHERE if e.last_sequence is None else e.last_sequence)
            for e in asked
        ]
        answers = iter(ask_replays(targets, self._args.timeout))
        return [None if e.replay_endpoint is None else next(answers) for e in listeners]

    def _engine(self, place: _Place, engines: list[Engine]) -> Iterator[Finding]:
        metrics = self._ask(place.url, "/metrics", with_key=True)
        engine = checks.engine_of(place.url, place.models, metrics)
        if place.models.status == 200:
            engines.append(engine)
        yield from checks.check_engine(engine, place.models, metrics)

    def _other(self, place: _Place) -> Iterator[Finding]:
        url = place.url
        if place.kind == "unreachable":
            how = place.workers.fix or "check host and port, and that the process runs"
            yield fail(url, "reachable", place.workers.said, how)
        elif place.kind == "locked":
            seen = f"GET /workers: {place.workers.said}"
            how = f"name a file with a key of the role admin by {KEY_FILE}"
            if place.workers.refused == "admin":
                how = "give the doctor that address instead of this one"
            elif place.workers.refused == "host":
                how = "add the name there, or give the doctor the service's IP address"
            elif place.workers.refused == "busy":
                how = "ask again: it compares the keys of other requests"
            elif self._args.service_key is not None:
                how = f"give {KEY_FILE} a key of the role admin"
            yield fail(url, "reachable", seen, how)
        elif place.health is not None:
            yield from self._routing(url, f"a kvflash {place.kind}", place.health)
            # Of workers that are missing altogether the finding above says enough.
            if place.workers.json:
                how = "register the missing workers: no request gets a worker until then"
                yield from checks.check_ready(url, self._ask(url, "/ready"), how)
        else:
            seen = (
                f"neither a kvflash service nor an engine: GET /workers: {place.workers.said}; "
                f"GET /v1/models: {place.models.said}"
            )
            how = "give the base URL of a kvflash service or of an engine"
            yield fail(url, "reachable", seen, how)

    @staticmethod
    def _routing(
        url: str, what: str, health: Answer, known: Sequence[workers.Worker] = ()
    ) -> Iterator[Finding]:
        """The router knows best why its matching fails, so only its reasons are reported."""
        body = health.fields
        # A service without healthy workers answers 503, with its state.
        if health.status == 200 or "status" in body:
            yield ok(url, "reachable", what)
        else:
            yield fail(url, "reachable", f"GET /health: {health.said}", "the message says why")
        yield from checks.check_clock(url, health.skew_s)
        if body.get("status") == "no_workers":
            how = "register workers with POST /workers, or start it with --endpoint or --worker"
            yield fail(url, "workers", "no worker is registered: every request is refused", how)
        yield from workers.check_reasons(url, body, known)


def _print(findings: Sequence[Finding], *, is_json: bool, status: int) -> None:
    counts = {level: sum(f.level == level for f in findings) for level in (OK, WARN, FAIL)}
    if is_json:
        report = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "findings": [asdict(finding) for finding in findings],
            "ok": counts[OK],
            "warnings": counts[WARN],
            "failures": counts[FAIL],
            "status": status,
        }
        print(json.dumps(report), flush=True)
        return
    for finding in findings:
        code = f" ({finding.code})" if finding.code else ""
        fix = f" | fix: {finding.fix}" if finding.fix else ""
        line = f"{finding.level:<4}  {finding.subject}: {finding.check}: {finding.seen}{code}{fix}"
        print(printable(line))
    warnings = counted(counts[WARN], "warning", "warnings")
    failures = counted(counts[FAIL], "failure", "failures")
    print(f"{counts[OK]} ok, {warnings}, {failures}", flush=True)
