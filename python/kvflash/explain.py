"""Shows a routing decision of a running frontend or router: every candidate with its cost."""

import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvflash.ask import Service, add_key_file, add_timeout
from kvflash.config import is_whole
from kvflash.console import counted, reason_of, refuse
from kvflash.errors import ConfigError, KvflashError, NotFoundError, TransportError
from kvflash.flags import Flags
from kvflash.output import ended
from kvflash.table import printable, table

_PROMPTS = ("prompt", "tokens", "file")


def main(argv: Sequence[str] | None = None) -> int:
    """Print a decision. Returns the exit status: 1 if the service can't be queried."""
    flags = _flags()
    args = flags.parse(argv)
    given = [name for name in _PROMPTS if getattr(args, name) is not None]
    more = [*given, *(name for name in ("model", "path") if getattr(args, name) is not None)]
    if args.request_id is not None and more:
        flags.error(f"--{more[0]} and a request id exclude each other; give one of them")
    if args.request_id is None and len(given) != 1:
        shown = " and ".join(f"--{name}" for name in given) or "nothing"
        flags.error(f"give one of --prompt, --tokens, --file or a request id; got {shown}")
    try:
        service = Service(args)
        if args.request_id is not None:
            answer = service.demand(f"/why/{quote(args.request_id, safe='')}")
        else:
            path = "" if args.path is None else f"?path={quote(args.path, safe='')}"
            answer = service.demand(f"/explain{path}", _body(service, args))
        lines = [answer.text] if args.is_json else _lines(answer.json)
    except KvflashError as error:
        name = args.request_id
        if isinstance(error, NotFoundError) and name is not None and Path(name).is_file():
            error = NotFoundError(f"{error} (a file? give it by --file {name})")
        return refuse("explain", error)
    print(*lines, sep="\n")
    return 0


def _lines(answer: Any) -> list[str]:
    try:
        return [*map(printable, lines_of(answer))]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise TransportError("the answer is not a decision; --json prints it unchanged") from None


def _flags() -> Flags:
    flags = Flags(
        "explain",
        "Show which worker would get a prompt and what it would cost on every worker (POST "
        "/explain, which neither sends nor books it), or why a past request went to its worker "
        "(GET /why).",
        has_variables=False,
    )
    flags.add_positionals("url", metavar="URL", summary="A frontend or a router", nargs=None)
    flags.add_positionals(
        "request_id",
        metavar="REQUEST_ID",
        summary="x-request-id of a past request, instead of a prompt",
        nargs="?",
    )
    flags.add("--prompt", metavar="TEXT", summary="A prompt")
    flags.add("--tokens", parse=_tokens, metavar="ID,...", summary="Token ids of a prompt")
    flags.add(
        "--file",
        metavar="FILE",
        summary="A request body in JSON, or a prompt as plain text; - reads standard input",
    )
    flags.add("--model", metavar="NAME", summary="The model; optional if only one is served")
    flags.add(
        "--path",
        metavar="PATH",
        summary="The API path of the body, such as /v1/messages, unless it is a chat or a "
        "completion; frontend only",
    )
    flags.add_toggle("is_json", on=["--json"], summary="Print the answer unchanged")
    add_timeout(flags)
    add_key_file(flags)
    return flags


def _tokens(text: str) -> list[int]:
    words = [word.strip() for word in text.strip("[] ").split(",")]
    if not all(is_whole(word, 0, 2**32 - 1) for word in words):
        raise ArgumentTypeError(f"must be token ids, separated by commas, got {text[:64]!r}")
    return [int(word) for word in words]


def _body(service: Service, args: Any) -> dict[str, Any]:
    body = _file(args.file) if args.file is not None else {}
    if args.prompt is not None:
        body = {"prompt": args.prompt}
    health = service.ask("/health")
    if health.status and not isinstance(health.json, dict):
        raise NotFoundError(
            f"{service.url} does not make decisions; give the URL of a frontend or a router"
        )
    if health.status and "reservations" in health.json:
        if args.path is not None:
            raise ConfigError(f"--path works only with a frontend: {service.url} is a router")
        if args.tokens is not None:
            body = {"token_ids": args.tokens}
        elif "prompt" in body and not {"token_ids", "tokens"} & body.keys():
            raise ConfigError(f"the router at {service.url} has no tokenizer: give --tokens")
        return body | ({"model_name": args.model} if args.model is not None else {})
    if args.tokens is not None:
        body = {"prompt": args.tokens}
    model = args.model
    if model is None and "model" not in body:
        model = _only_model(service)
    return body if model is None else body | {"model": model}


def _file(name: str) -> dict[str, Any]:
    if name == "-" and sys.stdin is None:
        raise ConfigError("--file -: standard input is closed; give a file, or text in --prompt")
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--file {name}: can't be read: {reason_of(error)}") from None
    try:
        found = json.loads(text)
    except ValueError as error:
        if text.lstrip().startswith("{"):
            raise ConfigError(
                f"--file {name}: starts like JSON but is invalid: {error}; correct it, or "
                "pass text that starts with { in --prompt"
            ) from None
        found = None
    return found if isinstance(found, dict) else {"prompt": text}


def _only_model(service: Service) -> str | None:
    """The model, if one only is served; None if there is none, or the caller may not ask."""
    answer = service.demand("/v1/models", but=(401, 403))
    if answer.status != 200:
        # The refusal names the role of clients. That of /explain names the role that it needs.
        return None
    try:
        names = [str(one["id"]) for one in answer.json["data"] if not one.get("parent")]
    except (AttributeError, KeyError, TypeError):
        raise TransportError(
            f"{service.url}/v1/models: the answer is not a list of models"
        ) from None
    if len(names) > 1:
        raise ConfigError(f"set --model: {service.url} serves {', '.join(names)}")
    # Without a model the refusal of /explain says what is wrong with the workers.
    return names[0] if names else None


#: Candidates that are printed, the cheapest ones; ``--json`` has those that the answer has.
CANDIDATES_MAX = 20


def lines_of(answer: Mapping[str, Any]) -> Iterator[str]:
    """The lines of an answer of ``POST /explain`` or ``GET /why``."""
    decisions = answer.get("decisions")
    if isinstance(decisions, list):
        yield f"request {answer.get('request_id')}"
        before = None
        for number, decision in enumerate(decisions, 1):
            yield ""
            if len(decisions) > 1:
                yield _title(f"decision {number} of {len(decisions)}", decision, before)
            yield from _decision(decision)
            yield _outcome(decision)
            before = decision
        return
    prefill = answer.get("prefill")
    if isinstance(prefill, dict):
        yield "prefill:"
        yield from _decision(prefill)
        yield ""
        yield "decode:"
    yield from _decision(answer)


def _title(name: str, decision: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """One of several decisions for an id: a request has several, and several may have its id."""
    age_ms = decision.get("age_ms")
    title = name if age_ms is None else f"{name}, {age_ms / 1000:.3f} s ago"
    # All decisions of a request have its model and prompt.
    others = before and [
        words
        for words, keys in (("model", ("model", "alias")), ("prompt length", ("isl_tokens",)))
        if any(decision.get(key) != before.get(key) for key in keys)
    ]
    return f"{title}: another request, with another {' and '.join(others)}" if others else title


def _decision(decision: Mapping[str, Any]) -> Iterator[str]:
    model = decision.get("model") or decision.get("model_name")
    if decision.get("lora_name"):
        model = f"{model} (adapter {decision['lora_name']})"
    # Other policies choose by something else than the cost.
    is_by_cost = decision.get("policy") in ("auto", "kv")
    about = counted(decision.get("isl_tokens"), "prompt token", "prompt tokens")
    if decision.get("prompt_source") == "unknown":
        why = "guessed from bytes: the tokens are not known, so cached blocks do not count"
        why += "; kvflash_untokenized_requests_total says why" if is_by_cost else ""
        about = f"about {about} ({why})"
    elif decision.get("block_size"):
        blocks = counted(decision.get("request_blocks"), "block", "blocks")
        about += f" ({blocks} of {decision['block_size']})"
    if decision.get("prompt_source") == "taught":
        about += ", blocks as an engine told them with an earlier answer"
    yield f"{model}: {about}, policy {decision.get('policy')}"
    if decision.get("instead_of"):
        yield f"{decision['instead_of']} gave no valid choice in time; the log and /health say why"
    worker = decision.get("worker")
    reason = str(decision.get("reason")).replace("_", " ")
    because = decision.get("because")
    yield f"worker {worker}: {reason}" + (f" ({because})" if because else "")
    diverted = decision.get("diverted")
    if diverted:
        wanted = "pinned to" if diverted.get("by") == "pin" else "its session was at"
        yield (
            f"{wanted} {diverted.get('from')}, which is {diverted.get('because')}: "
            "another was chosen"
        )
    if decision.get("expected_cached_tokens") is not None:
        yield f"{decision['expected_cached_tokens']} tokens are expected to come from its cache"
    yield ""
    yield from _candidates(decision.get("candidates") or [], worker, is_by_cost=is_by_cost)
    if decision.get("candidates_left_out"):
        yield f"{decision['candidates_left_out']} more candidates were not kept"


def _candidates(
    candidates: Sequence[Mapping[str, Any]], chosen: Any, *, is_by_cost: bool
) -> Iterator[str]:
    """A table of them."""
    ordered = sorted(candidates, key=_order)
    # The one that was chosen is shown, wherever it stands.
    ordered.sort(key=lambda one: one.get("worker") != chosen)
    shown = ordered[:CANDIDATES_MAX]
    prices = [one.get("price") or {} for one in shown]
    parts = list(dict.fromkeys(part for price in prices for part in price))
    # Blocks that events have not reported: the prompt was sent there a moment ago.
    predicted = [_predicted(one) for one in shown]
    columns: list[list[object]] = [
        ["", *("*" if one.get("worker") == chosen else "" for one in shown)],
        ["WORKER", *(one.get("worker") for one in shown)],
    ]
    if is_by_cost:
        columns.append(["COST", *(_number(one.get("cost")) for one in shown)])
        columns += [
            [part.upper(), *(_number(price.get(part)) for price in prices)] for part in parts
        ]
    columns.append(["CACHED", *(one.get("overlap_blocks") for one in shown)])
    if any(predicted):
        columns.append(["PREDICTED", *predicted])
    columns.append(["TO PREFILL", *(one.get("prefill_tokens") for one in shown)])
    columns.append(["RUNNING", *(one.get("active_requests") for one in shown)])
    columns.append(["NOTE", *map(_note, shown)])
    yield from table(list(zip(*columns, strict=True)))
    if len(ordered) > len(shown):
        yield f"... and {len(ordered) - len(shown)} more; --json has them"
    # What the cost is made of, where it has no parts with a column of their own.
    formulas = [str(one["formula"]) for one in shown if not one.get("price") and one.get("formula")]
    yield from ["", *formulas] if formulas and is_by_cost else []
    unit = "COST and its parts are tokens of prefill; " if parts and is_by_cost else ""
    yield ""
    blocks = (
        "CACHED and PREDICTED (further ones, sent there lately) are"
        if any(predicted)
        else "CACHED is"
    )
    yield f"{unit}{blocks} in blocks, TO PREFILL in tokens"


def _order(candidate: Mapping[str, Any]) -> tuple[bool, float]:
    """Cheapest first, and last those that the policy could not choose."""
    cost, is_out = candidate.get("cost"), candidate.get("is_busy") or candidate.get("is_draining")
    return bool(is_out), float(cost) if isinstance(cost, int | float) else float("inf")


def _predicted(candidate: Mapping[str, Any]) -> int:
    """Blocks that the worker was predicted to hold beyond those that it holds."""
    held, predicted = candidate.get("overlap_blocks"), candidate.get("predicted_blocks")
    return max(0, (predicted or 0) - (held or 0))


def _number(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, int | float) else "-"


def _note(candidate: Mapping[str, Any]) -> str:
    """Why it is not like the others."""
    notes = [word for word in ("busy", "draining") if candidate.get(f"is_{word}")]
    # A past decision has what is known now apart from what was known then.
    now = candidate.get("now")
    trust = (now or candidate).get("trust") or {}
    if isinstance(trust, str):
        # A router says only how far the worker's events can be believed, a frontend also why.
        notes += [f"events {trust}"] if trust != "exact" else []
    else:
        codes = [str(one["code"]).replace("_", " ") for one in trust.get("reasons") or []]
        notes += [f"now: {code}" if now else code for code in codes]
    credit = candidate.get("reuse_credit")
    notes += [f"its overlap is weighted by {credit:.2f}"] if isinstance(credit, int | float) else []
    return ", ".join(notes)


def _outcome(decision: Mapping[str, Any]) -> str:
    parts = [f"outcome: {str(decision.get('outcome')).replace('_', ' ')}"]
    for name, words in (("first_token_ms", "first token after"), ("ended_ms", "ended after")):
        if decision.get(name) is not None:
            parts.append(f"{words} {decision[name]} ms")
    if decision.get("cached_tokens") is not None:
        parts.append(f"{decision['cached_tokens']} tokens came from the cache")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(ended(main))
