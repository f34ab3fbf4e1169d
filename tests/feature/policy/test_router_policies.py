"""Policies beside the built-in ones, in the standalone router."""

from __future__ import annotations

import base64

import pytest

from kvflash import ConfigError, InvalidArgumentError
from kvflash.router import RouterService, parse_args
from service import EmbeddedIndexer, batch, stored, wait_for_sequence
from support_router import IDS, SIZE, add, ask, hold, worker

LOCAL = {"host": "127.0.0.1", "port": 0, "threads": 2, "seed": 1}
OTHERS = (
    "prefix-cache",
    "vtc-basic",
    "least-request",
    "least-kv-cache",
    "least-gpu-cache",
    "least-latency",
    "least-busy-time",
    "least-utilization",
    "throughput",
    "session-affinity",
    "prefix-cache:2,least-request:1",
)


@pytest.fixture
def http(client):
    """Makes routers with three workers of model m, and speaks to them."""
    made = []

    def make(policy=None, workers=3, **settings):
        service = RouterService(**LOCAL, router_mode=policy, **settings).start()
        made.append(service)
        http = client(service.url)
        for worker_id in range(1, workers + 1):
            add(http, worker_id)
        return http

    yield make
    for one in made:
        one.stop()


def metric(http, name):
    lines = http.get("/metrics").decode().splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)), None)


def reserve(http, name, tokens=IDS, **fields):
    return ask(http, "/reserve", tokens, request_id=name, **fields)


def free(http, name, **used):
    http.post("/free", {"request_id": name, **used})


@pytest.mark.parametrize("policy", OTHERS)
def test_every_policy_chooses_and_says_its_name(http, policy):
    weighty = "kv:overlap_score_weight=8,temperature=0.5"
    router = http(policy, shadow_policies=["kv", "least-request", weighty])
    for n in range(6):
        reserve(router, f"r-{n}", [n, *IDS], user="somebody")
    assert router.get("/health")["router_policy"] == policy
    assert ask(router, "/explain")["policy"] == policy
    info = f'kvflash_policy_info{{policy="{policy}",profile="document"}}'
    assert metric(router, info) == 1
    for shadow in ("kv", "least-request", weighty):
        assert metric(router, f'kvflash_shadow_decisions_total{{policy="{shadow}"}}') == 6


def test_flags_and_variables_of_both_names(http, monkeypatch):
    monkeypatch.setenv("AIBRIX_ROUTING_ALGORITHM", "least-request")
    monkeypatch.setenv("KVFLASH_POLICY_PROFILE", "aibrix-compat")
    monkeypatch.setenv("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "32")
    router = http()
    assert router.get("/health")["router_policy"] == "least-request"
    assert metric(router, 'kvflash_policy_info{policy="least-request",profile="aibrix-compat"}')
    source = 'name="PREFIX_CACHE_BLOCK_SIZE",source="AIBRIX_PREFIX_CACHE_BLOCK_SIZE",value="32"'
    assert metric(router, f"kvflash_policy_setting_info{{{source}}}") == 1
    source = 'name="POLICY_PROFILE",source="KVFLASH_POLICY_PROFILE",value="aibrix-compat"'
    assert metric(router, f"kvflash_policy_setting_info{{{source}}}") == 1
    router = http(policy_profile="document")
    source = 'name="POLICY_PROFILE",source="--policy-profile",value="document"'
    assert metric(router, f"kvflash_policy_setting_info{{{source}}}") == 1
    args = parse_args(["--router-mode", "vtc-basic", "--policy-profile", "document"])
    assert (args.router_mode, args.policy_profile) == ("vtc-basic", "document")
    args = parse_args(["--shadow-policy", "kv", "--shadow-policy", "throughput"])
    assert list(args.shadow_policies) == ["kv", "throughput"]
    monkeypatch.setenv("AIBRIX_ROUTING_ALGORITHM", "fastest")
    with pytest.raises(ConfigError, match=r"AIBRIX_ROUTING_ALGORITHM: .*session-affinity"):
        RouterService(**LOCAL)
    monkeypatch.setenv("AIBRIX_ROUTING_ALGORITHM", "pd")
    with pytest.raises(ConfigError, match=r"for pd use --prefill-worker and --decode-worker"):
        RouterService(**LOCAL)
    monkeypatch.setenv("AIBRIX_ROUTING_ALGORITHM", "vtc-fair:2,kv")
    with pytest.raises(ConfigError, match=r"for vtc-fair use --fairness vtc-fair"):
        RouterService(**LOCAL)
    with pytest.raises(ConfigError, match=r"--shadow-policy.*limit is 4"):
        RouterService(**LOCAL, router_mode="kv", shadow_policies=["kv"] * 5)


def test_prefix_cache_goes_by_text_or_by_four_bytes_a_token(http):
    router = http("prefix-cache")
    talks = {n: [n * 1_000 + at for at in range(64)] for n in range(9)}
    homes = {n: reserve(router, f"a-{n}", ids)["worker_id"] for n, ids in talks.items()}
    for n in talks:
        free(router, f"a-{n}")
    assert len(set(homes.values())) > 1
    for n, ids in talks.items():
        again = ask(router, tokens=[*ids, 5])
        assert (again["worker_id"], again["reason"]) == (homes[n], "prefix_match")
        # 64 tokens are two blocks of 128 bytes; the same bytes as text are the same prompt.
        text = b"".join(id_.to_bytes(4, "big") for id_ in ids)
        if text.isascii():
            by_text = router.post("/select", {"model_name": "m", "prompt": text.decode()})
            assert (by_text["worker_id"], by_text["reason"]) == (homes[n], "prefix_match")
    body = {"model_name": "m", "prompt": "what is it? " * 50}
    first = router.post("/reserve", {**body, "request_id": "text"})
    assert first["isl_tokens"] == 150
    free(router, "text")
    assert router.post("/select", {**body, "isl_tokens": 9})["worker_id"] == first["worker_id"]


def test_prefix_cache_goes_by_events_where_there_are_any(http, engine):
    router = http("prefix-cache", workers=2)
    engines = [engine(), engine()]
    for at, one in enumerate(engines, 3):
        add(router, at, engine=one)
    hold(router, engines[1], 4)
    answer = ask(router)
    assert (answer["worker_id"], answer["reason"]) == (4, "prefix_match")
    assert answer["overlap_blocks"] == 4


def test_a_remote_indexer_tells_prefix_cache_what_workers_hold(http, engine):
    indexer = EmbeddedIndexer()
    try:
        made = engine()
        body = {"instance_id": 2, "endpoint": made.endpoint, "model_name": "m", "block_size": SIZE}
        indexer.http.post("/register", body, expect=201)
        made.wait_for_subscriber()
        sequence = made.publish(batch(stored([1, 2, 3, 4], IDS, block_size=SIZE)))
        wait_for_sequence(indexer.http, 2, sequence)
        url = indexer.http.url
        router = http("prefix-cache", use_remote_indexer=url, remote_indexer_deadline=30.0)
        answer = ask(router)
        assert (answer["worker_id"], answer["reason"]) == (2, "prefix_match")
        assert answer["overlap_blocks"] == 4
    finally:
        indexer.close()


def test_what_was_used_corrects_the_clients_share(http):
    router = http("vtc-basic")
    for n in range(4):
        reserve(router, f"r-{n}", user="somebody")
    router.post("/prefill_complete", {"request_id": "r-0", "cached_tokens": 4})
    free(router, "r-0", prompt_tokens=16, completion_tokens=900)
    assert metric(router, "kvflash_vtc_corrected_requests_total") == 1
    assert metric(router, "kvflash_vtc_clients") == 1
    reserve(router, "r-5", user="somebody else")
    assert metric(router, "kvflash_vtc_clients") == 2
    ask(router, user="u" * 257, expect=400)
    refused = ask(router, session_key="k" * 257, expect=400)
    assert "session_key may have at most 256 bytes, got 257" in refused["error"]


def test_sessions_stay_with_the_worker_that_is_named_or_belongs_to_the_key(http):
    router = http("session-affinity")
    homes = {ask(router, tokens=[n, *IDS], session_key="k")["worker_id"] for n in range(9)}
    assert len(homes) == 1
    by_key = {ask(router, session_key=f"k-{n}")["worker_id"] for n in range(30)}
    assert by_key == {1, 2, 3}
    answer = ask(router, session_key="k-7")
    named = base64.b64encode(f"worker-{answer['worker_id']}".encode()).decode()
    assert answer["session_id"] == named
    for worker_id in (1, 2, 3):
        id_ = base64.b64encode(f"worker-{worker_id}".encode()).decode()
        found = ask(router, session_id=id_, session_key="k")
        assert (found["worker_id"], found["reason"]) == (worker_id, "session_header")
    # Ranks are distinct; an unknown rank or worker matches none.
    add(router, 9, dp_size=2)
    for id_, wanted in (("worker-9/1", (9, 1)), ("worker-9/2", None), ("elsewhere", None)):
        found = ask(router, session_id=base64.b64encode(id_.encode()).decode(), session_key="k")
        is_named = found["reason"] == "session_header"
        assert is_named == (wanted is not None)
        assert wanted is None or (found["worker_id"], found["dp_rank"]) == wanted
    assert "session_id" not in ask(http("kv"), session_key="k")


def test_engines_figures_are_reported_and_stay(http):
    router = http("least-kv-cache")
    for worker_id, usage in ((1, 0.5), (2, 0.125), (3, 0.75)):
        router.post("/report_load", {"worker_id": worker_id, "gpu_kv_usage": usage})
    assert ask(router)["worker_id"] == 2
    # Omitted settings keep their values; thresholds belong to no policy.
    router.post("/report_load", {"worker_id": 2, "kv_used_blocks": 5})
    router.post("/report_load", {"worker_id": 2, "running_requests": 3, "cpu_kv_usage": 0})
    assert ask(router)["worker_id"] == 2
    router.post("/report_load", {"worker_id": 2, "gpu_kv_usage": 1})
    assert ask(router)["worker_id"] == 1
    reported = worker(router, 2)["ranks"][0]["reported"]
    assert (reported["gpu_kv_usage"], reported["running_requests"]) == (1, 3)
    assert (reported["kv_used_blocks"], reported["utilization"]) == (5, None)
    for fields, text in (
        ({"gpu_kv_usage": 1.5}, "gpu_kv_usage must be in 0..=1, got 1.5"),
        ({"queue_s": -1}, "queue_s must be finite and at least 0, got -1"),
        ({"router_id": 5, "queue_s": 1}, "leave them out with router_id"),
    ):
        answer = router.post("/report_load", {"worker_id": 1, **fields}, expect=400)
        assert text in answer["error"]


def test_calls_without_http_say_the_same(http):
    with RouterService(**LOCAL, router_mode="least-request") as router:
        router.add_worker({"worker_id": 1, "model_name": "m"})
        with pytest.raises(InvalidArgumentError, match="user may have at most 256 bytes"):
            router.call("POST", "/select", {"isl_tokens": 9, "user": "u" * 300})


def test_the_settings_are_in_a_line_at_the_start(run):
    flags = ("--router-mode", "prefix-cache", "--host", "127.0.0.1", "--port", "0")
    process = run("kvflash.router", *flags, "--admin-port", "0")
    process.ready()
    process.close()
    said = "".join(process.errors)
    assert 'INFO routing policy policy="prefix-cache" profile=document' in said, said
    assert "INFO the admin side is served here address=127.0.0.1:" in said, said
