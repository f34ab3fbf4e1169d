"""Metrics used in deploy/ for Prometheus are exposed by a running indexer, with their labels."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import promql_parser
import pytest
import yaml

from kvflash.transport.options import ZmqOptions
from service import EmbeddedIndexer, Engine, batch, listener, stored, until, wait_for_sequence

DEPLOY = Path(__file__).parents[3] / "deploy"
PREFIX = "kvflash_kvindexer_"
# Labels added by the scrape.
SCRAPED = {"job", "instance"}
# Label values that only an indexer in trouble shows.
RARE = {"status_class": {"4xx", "5xx"}, "endpoint": {"/ready"}}
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@pytest.fixture(scope="module")
def samples():
    """Metrics of an indexer that has seen a bit of everything: name -> its label sets."""
    embedded = EmbeddedIndexer(ZmqOptions(), index_memory_bytes=64 * 2**20)
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
        found = defaultdict(list)
        for line in embedded.http.get("/metrics").decode().splitlines():
            if not line.startswith("#"):
                name = re.match(r"\w+", line)[0]
                found[name].append(dict(LABEL.findall(line)))
        yield found
    finally:
        embedded.close()
        engine.close()


def rules():
    text = (DEPLOY / "prometheus/kvflash-indexer.rules.yml").read_text(encoding="utf-8")
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def dashboard():
    return json.loads((DEPLOY / "grafana/kvflash-indexer.json").read_text(encoding="utf-8"))


def panels():
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions():
    """Every question that deploy/ asks, by where it is asked; Grafana's own words filled in."""
    found = {rule["alert"]: rule["expr"] for rule in rules()}
    for panel in panels():
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            question = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            found[f"${variable['name']}"] = f"count by ({question[2]}) ({question[1]})"
    filled = re.compile(r"\$(job|instance|model)\b")
    return {
        where: filled.sub(".*", text.replace("$__rate_interval", "5m"))
        for where, text in found.items()
    }


EXPRESSIONS = expressions()


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


def test_there_is_something_to_look_at():
    assert len(rules()) >= 10
    assert len(panels()) >= 15
    assert len(EXPRESSIONS) >= 35


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_metrics_and_labels_are_exposed(samples, where):
    selectors, groups = [], set()
    walk(promql_parser.parse(EXPRESSIONS[where]), (selectors, groups))
    assert selectors, "an expression asks for a metric"
    known = set(SCRAPED)
    for selector in selectors:
        if selector.name == "up":
            continue
        assert selector.name.startswith(PREFIX)
        rows = samples[selector.name]
        exposed = {label for row in rows for label in row} | SCRAPED
        if selector.name != PREFIX + "errors_total":
            assert rows, f"{selector.name} is not exposed"
        known |= exposed
        for matcher in selector.matchers.matchers:
            assert matcher.name in exposed, f"{selector.name} has no label {matcher.name}"
            if matcher.name in SCRAPED or matcher.value == ".*":
                continue
            values = {row.get(matcher.name) for row in rows} | RARE.get(matcher.name, set())
            wanted = matcher.value.split("|") if "=~" in str(matcher.op) else [matcher.value]
            for value in wanted:
                assert any(re.fullmatch(value, str(v)) for v in values), f"{matcher.name}={value}"
    assert groups <= known, f"grouped by {groups - known}, which no sample has"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alerts_say_what_and_why(samples, rule):
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    selectors = []
    walk(promql_parser.parse(rule["expr"]), (selectors, set()))
    labels = SCRAPED | {k for s in selectors for row in samples.get(s.name, []) for k in row}
    for text in rule["annotations"].values():
        used = set(re.findall(r"\$labels\.(\w+)", text))
        assert used <= labels, used - labels
        assert text.count("{{") == text.count("}}")


def test_names_are_told_once():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    every = dashboard()["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    assert len({panel["title"] for panel in every}) == len(every)


def test_panels_do_not_overlap_and_are_explained():
    taken = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    for panel in panels():
        assert panel["description"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            groups = set()
            walk(
                promql_parser.parse(EXPRESSIONS[f"{panel['title']} {target['refId']}"]),
                ([], groups),
            )
            is_grouped = " by (" in target["expr"]
            assert not is_grouped or used <= groups, panel["title"]


def test_every_reason_and_kind_has_a_place_in_the_documents(samples):
    """The manual explains each reason, and each kind of event."""
    manual = (DEPLOY.parent / "docs/indexer.md").read_text(encoding="utf-8")
    reasons = {row["reason"] for row in samples[PREFIX + "trust_reasons"]}
    assert len(reasons) >= 20
    assert not {reason for reason in reasons if f"`{reason}`" not in manual}
    events = (DEPLOY.parent / "docs/events.md").read_text(encoding="utf-8")
    kinds = {row["kind"] for row in samples[PREFIX + "events_total"]}
    assert not {kind for kind in kinds if f"`{kind}`" not in events}
    named = {name for name in samples if not name.endswith(("_bucket", "_count", "_sum"))}
    assert not {n for n in named if f"`{n.removeprefix(PREFIX)}" not in manual}
