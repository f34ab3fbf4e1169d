"""Checks of a frontend's workers, as pure functions from answers to findings."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvflash.ask import Answer
from kvflash.console import counted
from kvflash.doctor.checks import ELSEWHERE, Listener, causes_of, check_heard, check_replay
from kvflash.doctor.events import Heard, Replayed
from kvflash.doctor.finding import Finding, fail, ok, warn

#: Text that both sides tokenize: words, code, other scripts and white space.
SAMPLE_TEXT = (
    "def area(r: float) -> float:\n    return 3.14159 * r ** 2  # naïve, 東京 🙂  doesn't it?"
)

_TOKENIZER = "set --tokenizer to the folder of the model"
_PUBLISH = (
    "send the engine a prompt longer than one block; if still no event comes, restart the engine "
    'with "enable_kv_cache_events": true and "publisher": "zmq" in its --kv-events-config, and '
    "with prefix caching enabled"
)
# Codes of warnings that the checks of a worker's event sockets report, too.
_OF_SOCKETS = {"event_socket", "nothing_published"}
#: What /health shows for an engine that has not reported its reuse.
_REPORT = (
    "vLLM: start it with --enable-prompt-tokens-details; SGLang: with --enable-cache-report; both "
    'report in streams only with "stream_options": {"include_usage": true}'
)


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker of a frontend, as listed by its GET /workers."""

    frontend: str
    id: int
    url: str
    model: str | None
    is_prefill: bool
    entry: Mapping[str, Any]
    listeners: tuple[Listener, ...]

    @property
    def subject(self) -> str:
        """Its name in findings."""
        return f"{self.frontend} worker {self.id}"

    @property
    def is_http(self) -> bool:
        """Whether it speaks OpenAI's API; workers of the runtime do not."""
        return self.entry.get("loads") is None and self.url.startswith(("http://", "https://"))


def workers_of(url: str, workers: Any) -> list[Worker]:
    """The workers in a frontend's answer of GET /workers."""
    found = []
    for entry in workers if isinstance(workers, list) else []:
        number, size = int(entry["id"]), entry.get("block_size")
        listeners = tuple(
            Listener(
                indexer=url,
                instance=number,
                rank=int(one.get("dp_rank", 0)),
                model=str(entry.get("model") or ""),
                tenant="",
                block_size=size if isinstance(size, int) else None,
                entry=dict(one),
                service="the frontend",
                events_setting="events= of its --worker, or events in POST /workers",
                replay_setting=",replay=tcp://HOST:PORT after its --worker, or as replay in "
                "POST /workers",
            )
            for one in entry.get("listeners") or []
        )
        worker = Worker(
            frontend=url,
            id=number,
            url=str(entry.get("url", "")),
            model=entry.get("model"),
            is_prefill=entry.get("role") == "prefill",
            entry=entry,
            listeners=listeners,
        )
        found.append(worker)
    return found


def check_reasons(
    url: str, health: Mapping[str, Any], known: Sequence[Worker] = ()
) -> Iterator[Finding]:
    """The frontend's own reasons for being degraded, and its other warnings.

    What other checks report, such as :func:`check_worker` of the ``known`` workers, is left out.
    """
    reasons = [one for one in health.get("reasons") or [] if isinstance(one, dict)]
    for reason in reasons:
        code, seen, fix = (str(reason.get(name)) for name in ("code", "message", "fix"))
        yield fail(f"{url} worker {reason.get('worker')}", "trust", seen, fix, code)
    told = {(str(reason.get("code")), str(reason.get("worker"))) for reason in reasons}
    healthy = {str(worker.id): bool(worker.entry.get("healthy")) for worker in known}
    sockets = {f"{worker.id}:{one.rank}" for worker in known for one in worker.listeners}
    for cause in causes_of(health):
        code, worker = str(cause.get("code") or ""), str(cause.get("worker"))
        is_told = (code, worker) in told or code == "tokens_differ"
        is_told |= worker in sockets and code in _OF_SOCKETS
        is_told |= worker in healthy and code == "events_not_given"
        is_told |= healthy.get(worker) is False and code == "worker_error"
        if not is_told:
            fix = str(cause.get("fix") or 'see "What /health warns of" in docs/frontend.md')
            yield warn(url, "warnings", str(cause.get("message")), fix, code)


def check_parity(url: str, health: Mapping[str, Any]) -> Iterator[Finding]:
    """How the frontend's tokens compare with those of its engines, by API form."""
    parity = health.get("parity")
    for model, versions in sorted(parity.items() if isinstance(parity, dict) else ()):
        for version, record in sorted(versions.items()):
            forms = record.get("forms") or {}
            subject = f"{url} model {model}, engines {version}"
            if record.get("compared_s_ago") is None:
                yield ok(subject, "parity", "not compared yet")
                continue
            by_outcome: dict[str, list[str]] = {}
            for name, form in sorted(forms.items()):
                by_outcome.setdefault(str(form.get("outcome")), []).append(name)
            differing = by_outcome.pop("differs", [])
            if differing:
                why = forms[differing[0]].get("why")
                how = f"{_TOKENIZER} that the engines serve, with its chat template"
                seen = f"prompts of the forms {', '.join(differing)} differ ({why})"
                yield warn(subject, "parity", f"{seen}; the engines render them", how)
            told = [f"{outcome}: {', '.join(names)}" for outcome, names in by_outcome.items()]
            if not differing:
                yield ok(subject, "parity", "; ".join(told))


def _repair(status: int | None) -> str:
    """The fix for an unhealthy worker: one that gave an answer needs another than a silent one."""
    if status is None:
        return "check that the engine runs, and that the frontend's host reaches it"
    if status in (401, 403):
        return (
            "give the frontend the engine's API key: --worker-api-key-file, or "
            "KVFLASH_WORKER_API_KEY"
        )
    return "check that the worker's URL is the engine's, and see the engine's log"


def check_worker(
    worker: Worker,
    health: Mapping[str, Any],
    replays: Mapping[tuple[int, int], Replayed],
    heard: Mapping[str, Heard],
    timeout_s: float,
    *,
    unreached: str = "",
) -> Iterator[Finding]:
    """Check one worker: its health, its event sockets, and its reported reuse.

    ``unreached`` says why the worker's own HTTP port gave this host no answer.
    """
    if worker.entry.get("healthy"):
        yield ok(worker.subject, "healthy", f"{worker.url} serves {worker.model}")
    else:
        seen = str(worker.entry.get("last_error") or "it has not been checked yet")
        yield fail(worker.subject, "healthy", seen, _repair(worker.entry.get("last_status")))
        # Its sockets have the same cause.
        return
    if worker.entry.get("state") == "draining":
        how = f"kvflash workers resume {worker.frontend} {worker.id}"
        yield warn(worker.subject, "draining", "it takes no new requests", how)
    if not worker.listeners:
        yield from _check_no_events(worker, health)
    for listener in worker.listeners:
        yield from _check_connected(listener)
        if listener.entry.get("status") == "active":
            yield from _check_events(listener, worker, health)
        yield from _check_block_size(listener, worker.entry)
        replayed = replays.get((listener.instance, listener.rank))
        yield from check_replay(listener, replayed, timeout_s, unreached)
        if listener.endpoint in heard:
            yield from check_heard(listener, heard[listener.endpoint])
    yield from _check_reuse(worker, health.get("reuse"))


def _check_no_events(worker: Worker, health: Mapping[str, Any]) -> Iterator[Finding]:
    for cause in causes_of(health):
        if (cause.get("code"), cause.get("worker")) == ("events_not_given", str(worker.id)):
            seen = str(cause.get("message")).removeprefix(f"worker {worker.id}: ")
            how = (
                "give the worker events=tcp://HOST:PORT, the endpoint of its --kv-events-config, "
                "or start the frontend with --no-kv-events"
            )
            yield warn(worker.subject, "events", seen, how)
            return


def _check_connected(listener: Listener) -> Iterator[Finding]:
    entry, subject = listener.entry, listener.subject
    if entry.get("status") == "active":
        yield ok(subject, "connected", f"to {listener.endpoint}")
        return
    seen = f"{listener.endpoint}: {entry.get('status')}: {entry.get('last_error')}"
    how = (
        "check that events= is the endpoint of the engine's --kv-events-config, and that the "
        "frontend's host reaches it (nc -vz HOST PORT)"
    )
    yield fail(subject, "connected", seen, how)


def _check_events(
    listener: Listener, worker: Worker, health: Mapping[str, Any]
) -> Iterator[Finding]:
    subject, counts = listener.subject, listener.entry.get("events") or {}
    if counts.get("batches"):
        yield ok(subject, "publishes", counted(counts["batches"], "batch", "batches"))
    else:
        yield _silence(listener, worker, health)
    if counts.get("undecodable"):
        one, many = "message is not an event batch", "messages are not event batches"
        seen = counted(counts["undecodable"], one, many)
        how = "check that the endpoint is the KV event socket of a vLLM or SGLang engine"
        yield warn(subject, "decodes", seen, how)


def _silence(listener: Listener, worker: Worker, health: Mapping[str, Any]) -> Finding:
    """Judge that no event came: an engine publishes only the blocks that it stores."""
    subject = listener.subject
    reuse = (health.get("reuse") or {}).get(f"{worker.id}:{listener.rank}") or {}
    if any((one.entry.get("events") or {}).get("batches") for one in worker.listeners):
        seen = "no events yet; another rank of its engine publishes, so this one may be idle"
        return ok(subject, "publishes", seen)
    # If the events stay away, the frontend reports the code events_missing.
    if reuse.get("reported_tokens"):
        seen = (
            f"no events yet; the engine reused {reuse['reported_tokens']} tokens, which it may "
            "hold from before the frontend's start, and such prompts store nothing new"
        )
        return ok(subject, "publishes", seen)
    requests, failures = (worker.entry.get(name) or 0 for name in ("requests", "failures"))
    sent = counted(requests, "request", "requests")
    # Failures include failed health checks; a silence that lasts is a warning of the frontend.
    if requests > failures:
        seen = f"no events came, although its engine got {sent}"
        return warn(subject, "publishes", seen, _PUBLISH)
    if not requests:
        return ok(subject, "publishes", "no events yet, and no requests")
    seen = f"no events yet; its engine got {sent} and may have answered none: failures {failures}"
    return ok(subject, "publishes", seen)


def _check_block_size(listener: Listener, worker: Mapping[str, Any]) -> Iterator[Finding]:
    own, counts = worker.get("engine_block_size"), listener.entry.get("events") or {}
    # The engine's own size does not say it: the events may have a multiple of it.
    is_deaf = counts.get("block_size_mismatch") and not counts.get("stored")
    if is_deaf or (isinstance(own, int) and not listener.fits_block_size(own)):
        seen = f"the engine has {own} tokens, the index {listener.block_size}"
        if is_deaf:
            seen = f"no stored block has the index's {listener.block_size} tokens: nothing matches"
        how = (
            "remove --kv-cache-block-size of the frontend, if given, and give all engines of a "
            "model the same --block-size"
        )
        yield fail(listener.subject, "block size", seen, how)


def _check_reuse(worker: Worker, reuse: Any) -> Iterator[Finding]:
    for name, known in sorted((reuse if isinstance(reuse, dict) else {}).items()):
        if str(name).partition(":")[0] != str(worker.id) or not isinstance(known, dict):
            continue
        subject, trust = f"{worker.frontend} worker {name}", known.get("trust", 1.0)
        if known.get("reported") is False:
            seen = "the engine reports no reuse: its events cannot be checked"
            yield warn(subject, "reuse", seen, _REPORT)
        elif not known.get("reported"):
            seen = (
                "no answer has reported reused tokens yet; if prompts repeat, check that the "
                "engine's prefix caching is on and that it reports reuse (vLLM: "
                "--enable-prompt-tokens-details; SGLang: --enable-cache-report)"
            )
            yield ok(subject, "reuse", seen)
        else:
            seen = (
                f"the events predicted {known.get('predicted_tokens')} tokens, the engine reused "
                f"{known.get('reported_tokens')}; its overlap is weighted by {trust:.2f}"
            )
            if trust < 1.0:
                how = "compare its events= with the engine's --kv-events-config"
                yield warn(subject, "reuse", seen, f"{how}; see docs/frontend.md")
            else:
                yield ok(subject, "reuse", seen)


def token_ids(answer: Answer) -> list[int] | None:
    """The token ids in a frontend's answer to ``query_instance_id``."""
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            try:
                ids = json.loads(line[6:])["nvext"]["token_ids"]
            except (ValueError, KeyError, TypeError):
                return None
            return ids if isinstance(ids, list) else None
    return None


def check_tokens(worker: Worker, query: Answer, engine: Answer) -> Iterator[Finding]:
    """Compare the tokens of a text in the frontend's answer with those of the worker's engine."""
    if query.status != 200:
        seen = f"not compared: POST /v1/completions: {query.said}"
        if query.status == 503:
            # Other findings say why the frontend refuses requests.
            yield ok(worker.subject, "tokens", seen)
        else:
            yield warn(worker.subject, "tokens", seen, query.fix or "the message says why")
        return
    ours = token_ids(query)
    if ours is None:
        seen = "the frontend returned no tokens for the test text"
        how = "send it a prompt; kvflash_untokenized_requests_total{cause} says why"
        yield warn(worker.subject, "tokens", seen, how)
        return
    theirs = engine.fields.get("tokens") if engine.status == 200 else None
    if not engine.status:
        seen = f"not compared: POST /tokenize: {engine.said}"
        yield warn(worker.subject, "tokens", seen, engine.fix or ELSEWHERE)
    elif not isinstance(theirs, list):
        yield ok(worker.subject, "tokens", f"not compared: POST /tokenize: {engine.said}")
    elif list(ours) == theirs:
        yield ok(worker.subject, "tokens", f"{len(theirs)} for the test text, as in the frontend")
    else:
        seen = (
            f"the frontend makes {len(ours)} tokens of the test text, the engine "
            f"{len(theirs)} different ones"
        )
        how = (
            f"{_TOKENIZER} that the engine serves, or remove it: kvflash then uses the engine's "
            "own /tokenize"
        )
        yield fail(worker.subject, "tokens", seen, how)
