"""Metrics used in deploy/ for Prometheus are exposed by running services, with their labels."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import promql_parser
import pytest
import yaml

from service import (
    VECTORS,
    EmbeddedIndexer,
    Engine,
    batch,
    listener,
    stored,
    until,
    wait_for_sequence,
)
from support_frontend import Frontend, Mocker

DEPLOY = Path(__file__).parents[3] / "deploy"
PREFIX = {"indexer": "kvflash_kvindexer_", "frontend": "kvflash_"}
# Labels added by the scrape.
SCRAPED = {"job", "instance"}
# Label values and metrics that only a service in trouble shows.
RARE = {
    "status_class": {"4xx", "5xx"},
    "endpoint": {"/", "/ready", "/live", "/health", "/metrics"},
}
RARELY_EXPOSED = {"kvflash_kvindexer_errors_total", "kvflash_attempts_failed_total"}
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@pytest.fixture(scope="module")
def samples():
    """Metrics of services that have seen a bit of everything: service -> name -> its label sets."""
    return {"indexer": parsed(indexer_metrics()), "frontend": parsed(frontend_metrics())}


def parsed(text):
    found = defaultdict(list)
    for line in text.splitlines():
        if not line.startswith("#"):
            found[re.match(r"\w+", line)[0]].append(dict(LABEL.findall(line)))
    return found


def frontend_metrics():
    folder = ("--tokenizer", str(VECTORS / "tiny-llama"))
    with (
        Mocker("--speedup-ratio", "1000", *folder) as mocker,
        Frontend("--worker", mocker.spec(0), *folder) as frontend,
    ):
        frontend.wait_healthy(1)
        chat = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}
        frontend.http.post("/v1/chat/completions", {**chat, "max_tokens": 2})
        until(lambda: b"kvflash_parity{" in frontend.http.get("/metrics"), "the comparison")
        return frontend.http.get("/metrics").decode()


def indexer_metrics():
    embedded = EmbeddedIndexer(index_memory_bytes=64 * 2**20)
    engine = Engine()
    try:
        body = {"instance_id": 1, "endpoint": engine.endpoint, "model_name": "m", "block_size": 2}
        body = {**body, "replay_endpoint": engine.replay_endpoint, "capacity_blocks": 10}
        embedded.http.post("/register", body, expect=201)
        engine.wait_for_subscriber()
        until(lambda: listener(embedded.http, 1)["status"] == "active", "the connection")
        event = stored([1], (1, 1), block_size=2)
        wait_for_sequence(embedded.http, 1, engine.publish(batch(event)))
        embedded.http.post("/query", {"model_name": "m", "token_ids": [1, 1]})
        embedded.http.call("GET", "/ready")
        embedded.http.call("GET", "/nowhere")
        return embedded.http.get("/metrics").decode()
    finally:
        embedded.close()
        engine.close()


def rules(service):
    path = DEPLOY / f"prometheus/kvflash-{service}.rules.yml"
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard(service):
    return json.loads((DEPLOY / f"grafana/kvflash-{service}.json").read_text(encoding="utf-8"))


def panels(service):
    return [panel for panel in dashboard(service)["panels"] if panel["type"] != "row"]


def expressions(service):
    """Every question that deploy/ asks, by where it is asked; Grafana's own words filled in."""
    found = {rule["alert"]: rule["expr"] for rule in rules(service)}
    for panel in panels(service):
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    for variable in dashboard(service)["templating"]["list"]:
        if variable["type"] == "query":
            question = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            found[f"${variable['name']}"] = f"count by ({question[2]}) ({question[1]})"
    filled = re.compile(r"\$(job|instance|model)\b")
    return {
        where: filled.sub(".*", text.replace("$__rate_interval", "5m"))
        for where, text in found.items()
    }


EXPRESSIONS = {service: expressions(service) for service in PREFIX}
ASKED = [(service, where) for service, asked in EXPRESSIONS.items() for where in asked]
RULES = [(service, rule) for service in PREFIX for rule in rules(service)]


def walk(node, found):
    """Selectors of an expression, and the labels that it groups or matches by."""
    if isinstance(node, promql_parser.VectorSelector):
        found[0].append(node)
        return
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
        found[1].update(node.modifier.labels)
    if isinstance(node, promql_parser.BinaryExpr) and node.modifier is not None:
        matching = node.modifier.matching
        found[1].update(matching.labels if matching is not None else ())
    for name in ("lhs", "rhs", "expr", "param", "vector_selector", "vs"):
        child = getattr(node, name, None)
        if isinstance(child, promql_parser.Expr):
            walk(child, found)
    for child in getattr(node, "args", None) or ():
        walk(child, found)


@pytest.mark.parametrize("service", PREFIX)
def test_there_is_something_to_look_at(service):
    assert len(rules(service)) >= 10
    assert len(panels(service)) >= 15
    assert len(EXPRESSIONS[service]) >= 35


@pytest.mark.parametrize(("service", "where"), ASKED)
def test_metrics_and_labels_are_exposed(samples, service, where):
    selectors, groups = [], set()
    walk(promql_parser.parse(EXPRESSIONS[service][where]), (selectors, groups))
    assert selectors, "an expression asks for a metric"
    known = set(SCRAPED)
    for selector in selectors:
        if selector.name == "up":
            continue
        assert selector.name.startswith(PREFIX[service])
        rows = samples[service][selector.name]
        exposed = {label for row in rows for label in row} | SCRAPED
        if selector.name in RARELY_EXPOSED and not rows:
            known.add("cause")
            continue
        assert rows, f"{selector.name} is not exposed"
        known |= exposed
        for matcher in selector.matchers.matchers:
            assert matcher.name in exposed, f"{selector.name} has no label {matcher.name}"
            if matcher.name in SCRAPED or matcher.value == ".*":
                continue
            values = {row.get(matcher.name) for row in rows} | RARE.get(matcher.name, set())
            wanted = matcher.value.split("|")
            for value in wanted:
                assert any(re.fullmatch(value, str(v)) for v in values), f"{matcher.name}={value}"
    assert groups <= known, f"grouped by {groups - known}, which no sample has"


@pytest.mark.parametrize(
    ("service", "rule"), RULES, ids=lambda one: one if isinstance(one, str) else one["alert"]
)
def test_alerts_say_what_and_why(samples, service, rule):
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    selectors = []
    walk(promql_parser.parse(rule["expr"]), (selectors, set()))
    labels = SCRAPED | {
        k for s in selectors for row in samples[service].get(s.name, []) for k in row
    }
    for text in rule["annotations"].values():
        used = set(re.findall(r"\$labels\.(\w+)", text))
        assert used <= labels, used - labels
        assert text.count("{{") == text.count("}}")


def test_every_reason_of_degraded_trust_that_lasts_raises_an_alert(samples):
    """Stale workers have an alert whatever the reason; a full index has alerts on its counters."""
    passing = {"no_events_yet", "missed_first_batches"}
    stale = {"failed", "never_connected", "disconnected", "paused", "nothing_decodable"}
    counted = {"orphaned_stores", "over_capacity", "refused_blocks", "evicted_by_limit"}
    reasons = {row["reason"] for row in samples["indexer"][PREFIX["indexer"] + "trust_reasons"]}
    selectors = []
    for rule in rules("indexer"):
        walk(promql_parser.parse(rule["expr"]), (selectors, set()))
    alerted = {
        reason
        for selector in selectors
        for matcher in selector.matchers.matchers
        if matcher.name == "reason"
        for reason in matcher.value.split("|")
    }
    assert reasons - passing - stale - counted == alerted


def test_alerts_have_names_of_their_own():
    names = [rule["alert"] for _, rule in RULES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("service", PREFIX)
def test_panels_have_names_of_their_own(service):
    every = dashboard(service)["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    assert len({panel["title"] for panel in every}) == len(every)


@pytest.mark.parametrize("service", PREFIX)
def test_panels_do_not_overlap_and_are_explained(service):
    taken = set()
    for panel in dashboard(service)["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    for panel in panels(service):
        assert panel["description"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            groups = set()
            walk(
                promql_parser.parse(EXPRESSIONS[service][f"{panel['title']} {target['refId']}"]),
                ([], groups),
            )
            is_grouped = " by (" in target["expr"]
            assert not is_grouped or used <= groups, panel["title"]


def test_every_reason_and_kind_has_a_place_in_the_documents(samples):
    """The manual explains each reason, and each kind of event."""
    of_indexer, prefix = samples["indexer"], PREFIX["indexer"]
    manual = (DEPLOY.parent / "docs/indexer.md").read_text(encoding="utf-8")
    reasons = {row["reason"] for row in of_indexer[prefix + "trust_reasons"]}
    assert len(reasons) >= 20
    assert not {reason for reason in reasons if f"`{reason}`" not in manual}
    events = (DEPLOY.parent / "docs/events.md").read_text(encoding="utf-8")
    kinds = {row["kind"] for row in of_indexer[prefix + "events_total"]}
    assert not {kind for kind in kinds if f"`{kind}`" not in events}
    named = {name for name in of_indexer if not name.endswith(("_bucket", "_count", "_sum"))}
    assert not {n for n in named if f"`{n.removeprefix(prefix)}" not in manual}
