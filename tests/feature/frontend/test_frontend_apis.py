"""Every API of engines, by its official client where it has one: two mockers behind a frontend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from service import until
from support_apis import library, two_mockers
from support_frontend import Frontend

if TYPE_CHECKING:
    import anthropic
    import openai

# More than eight blocks of 16 byte tokens.
TEXT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def frontend() -> Iterator[Frontend]:
    with two_mockers("--model-alias", "gpt-4o=m") as frontend:
        yield frontend


@pytest.fixture(scope="module")
def client(frontend: Frontend) -> Iterator[openai.OpenAI]:
    with library("openai").OpenAI(
        base_url=frontend.url + "/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def claude(frontend: Frontend) -> Iterator[anthropic.Anthropic]:
    with library("anthropic").Anthropic(
        base_url=frontend.url, api_key="none", max_retries=0
    ) as client:
        yield client


def overlap(headers: Any) -> int:
    return int(headers["x-kvflash-overlap-blocks"])


def until_matched(ask: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """Ask until all events of the first answer are known: blocks expected, tokens reported."""
    for _ in range(50):
        expected, cached = ask()
        assert cached >= expected * 16
        # The last event may come in between.
        if expected > 6 and cached == expected * 16:
            break
    return expected, cached


def test_what_an_engine_does_not_look_up_is_not_credited(client: openai.OpenAI) -> None:
    """Log probabilities of a prompt are computed anew, and a truncated prompt is another one."""
    ids = [10 + at % 90 for at in range(130)]

    def credit(**fields: Any) -> int:
        raw = client.completions.with_raw_response.create(
            model="m", prompt=ids, max_tokens=1, extra_body=fields
        )
        return overlap(raw.headers)

    until(lambda: credit() == 8, "the prompt to be known")
    assert credit(echo=True) == credit(n=2) == 8
    assert credit(prompt_logprobs=0) == 0
    assert credit(skip_reading_prefix_cache=True) == 0
    assert credit(echo=True, logprobs=1) == 0
    assert credit(truncate_prompt_tokens=8) == 0


def test_responses(client: openai.OpenAI) -> None:
    def ask() -> tuple[int, int]:
        raw = client.responses.with_raw_response.create(
            model="m", input="responses " + TEXT, instructions="Be brief.", max_output_tokens=5
        )
        answer = raw.parse()
        assert answer.usage is not None and len(answer.output_text) == 5
        return overlap(raw.headers), answer.usage.input_tokens_details.cached_tokens

    expected, cached = until_matched(ask)
    assert cached == expected * 16 > 100


def test_a_response_streams_and_is_continued(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="m", input="stream " + TEXT, extra_body={"max_output_tokens": 5}
    ) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") == 5
    assert len(first.output_text) == 5
    # Only the worker that keeps it can go on: chance would fail half of these.
    for turn in range(6):
        told = client.responses.create(
            model="m", input=f"turn {turn}", previous_response_id=first.id, max_output_tokens=2
        )
        assert told.previous_response_id == first.id and told.usage is not None
        assert told.usage.input_tokens > 180
    with pytest.raises(library("openai").NotFoundError, match="Previous response") as error:
        client.responses.create(model="m", input="x", previous_response_id="resp_unknown")
    assert error.value.status_code == 404


def test_a_kept_response_is_found_and_deleted(client: openai.OpenAI) -> None:
    # Only the worker that keeps it knows it: chance would fail most of these.
    for turn in range(4):
        made = client.responses.create(model="m", input=f"kept {turn}", max_output_tokens=2)
        found = client.responses.retrieve(made.id)
        assert (found.id, found.output_text) == (made.id, made.output_text)
        with pytest.raises(library("openai").BadRequestError, match="synchronous"):
            client.responses.cancel(made.id)
        client.responses.delete(made.id)
        with pytest.raises(library("openai").NotFoundError, match="not found"):
            client.responses.retrieve(made.id)
    with pytest.raises(library("openai").NotFoundError, match="it names no worker"):
        client.responses.retrieve("resp_unknown")


def test_speech(client: openai.OpenAI) -> None:
    sound = client.audio.speech.create(model="m", voice="alloy", input="hello")
    assert sound.read().startswith(b"RIFF")


def test_aliases(client: openai.OpenAI) -> None:
    assert {"m", "gpt-4o"} <= {model.id for model in client.models.list()}
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"
    told = client.responses.create(model="gpt-4o", input="x", max_output_tokens=1)
    assert told.model == "m"
    raw = client.embeddings.with_raw_response.create(model="gpt-4o", input="x")
    assert raw.parse().model == "m"


def test_messages(claude: anthropic.Anthropic) -> None:
    def ask() -> tuple[int, int]:
        raw = claude.messages.with_raw_response.create(
            model="m",
            max_tokens=5,
            system="Be brief.",
            messages=[{"role": "user", "content": "messages " + TEXT}],
        )
        answer = raw.parse()
        assert answer.stop_reason == "max_tokens"
        assert answer.content[0].type == "text" and len(answer.content[0].text) == 5
        return overlap(raw.headers), answer.usage.cache_read_input_tokens or 0

    expected, cached = until_matched(ask)
    assert cached == expected * 16 > 100


def test_a_message_streams_and_is_counted(claude: anthropic.Anthropic) -> None:
    told: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "stream"}]}]
    with claude.messages.stream(model="m", max_tokens=7, messages=told) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert (len(text), message.usage.output_tokens) == (7, 7)
    used = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert claude.messages.count_tokens(model="m", messages=told).input_tokens == used


def test_the_official_errors_are_raised(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    with pytest.raises(library("openai").NotFoundError, match="not served"):
        client.responses.create(model="nobody", input="x")
    with pytest.raises(library("openai").BadRequestError, match="input must be"):
        client.responses.create(model="m", input=[])
    with pytest.raises(library("openai").NotFoundError, match="did you mean /v1/embeddings"):
        client.with_options(base_url=str(client.base_url) + "v1").embeddings.create(
            model="m", input="x"
        )
    told: list[Any] = [{"role": "user", "content": "x"}]
    with pytest.raises(library("anthropic").NotFoundError, match="not served"):
        claude.messages.create(model="nobody", max_tokens=1, messages=told)
    with pytest.raises(library("anthropic").RateLimitError, match="asks for 429"):
        claude.with_options(default_headers={"x-mocker-status": "429"}).messages.create(
            model="m", max_tokens=1, messages=told
        )


def test_embeddings(client: openai.OpenAI) -> None:
    # By base64, which the client asks for.
    packed = client.embeddings.create(model="m", input=["a", "b", "a"])
    assert [one.index for one in packed.data] == [0, 1, 2]
    assert packed.data[0].embedding == packed.data[2].embedding != packed.data[1].embedding
    plain = client.embeddings.create(model="m", input=[97], encoding_format="float", dimensions=4)
    assert plain.data[0].embedding == pytest.approx(packed.data[0].embedding[:4])
    assert plain.usage.prompt_tokens == 1


def test_what_has_no_client(frontend: Frontend) -> None:
    http = frontend.http
    documents = {"query": "q", "documents": ["a", "b", "c"], "top_n": 2}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = http.post(path, documents)["results"]
        scores = [one["relevance_score"] for one in results]
        assert len(scores) == 2 and scores == sorted(scores, reverse=True)
        assert results[0]["document"]["text"] == documents["documents"][results[0]["index"]]
    for path in ("/score", "/v1/score"):
        data = http.post(path, {"text_1": "a", "text_2": ["b", "c"]})["data"]
        assert [one["index"] for one in data] == [0, 1]
    classes = http.post("/classify", {"input": ["a", "b"]})["data"]
    assert all(sum(one["probs"]) == pytest.approx(1) for one in classes)
    assert len(http.post("/pooling", {"input": "a"})["data"][0]["data"]) == 16
    assert http.post("/tokenize", {"prompt": "ab"})["tokens"] == [97, 98]
    assert http.post("/detokenize", {"tokens": [97, 98]})["prompt"] == "ab"
    for path in ("/rerank", "/score", "/classify", "/pooling", "/v1/embeddings"):
        status, body, _ = http.call("POST", path, {})
        assert (status, body["error"]["code"]) == (400, 400), path


@pytest.mark.parametrize(
    ("path", "field", "limit"),
    [
        ("/generate", "input_ids", "max_new_tokens"),
        ("/inference/v1/generate", "token_ids", "max_tokens"),
    ],
)
def test_tokens_in(frontend: Frontend, path: str, field: str, limit: str) -> None:
    body = {field: list((path + TEXT).encode()), "sampling_params": {limit: 3}}

    def ask() -> tuple[int, int]:
        status, answer, headers = frontend.http.call("POST", path, body)
        assert status == 200, answer
        if "meta_info" in answer:
            return overlap(headers), answer["meta_info"]["cached_tokens"]
        assert len(answer["choices"][0]["token_ids"]) == 3
        return overlap(headers), answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    expected, cached = until_matched(ask)
    assert cached == expected * 16 > 100
    assert frontend.http.post(f"/explain?path={path}", body)["expected_cached_tokens"] == cached
    typo = frontend.http.post(f"/explain?pth={path}", body, expect=400)
    assert "unknown field `pth`, expected `path`" in str(typo)


def test_answers_are_evidence_of_events(frontend: Frontend) -> None:
    # All that was asked above: usage of every API was read, and agreed with what was expected.
    metrics = frontend.metrics()
    assert metrics["kvflash_usage_reports_total"] > 5
    assert metrics.get("kvflash_token_mismatches_total", 0) == 0
    for path in ("/v1/responses", "/v1/messages", "/generate", "/rerank", "/v1/embeddings"):
        assert metrics[f'kvflash_requests_total{{endpoint="{path}",status="200"}}'] > 0, path
    frontend.wait_idle()
