"""Images: the same one matches, another one of the same size does not."""

from __future__ import annotations

from typing import Any

from support_frontend import CHAT, FakeEngine, Frontend
from support_tokens import TINY_LLAMA


def ask(image: str) -> dict[str, Any]:
    parts = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
    ]
    return {"model": "eyes", "max_tokens": 1, "messages": [{"role": "user", "content": parts}]}


def render(body: dict[str, Any]) -> dict[str, Any]:
    """As vLLM does: 80 tokens, of which an image takes 32."""
    url = body["messages"][0]["content"][1]["image_url"]["url"]
    image = {"image": [f"hash of {url}"]}, {"image": [{"offset": 20, "length": 32}]}
    features = {"mm_hashes": image[0], "mm_placeholders": image[1], "kwargs_data": None}
    return {"token_ids": list(range(80)), "features": features, "sampling_params": {}}


def test_images_are_told_apart_by_their_content() -> None:
    for flags in ((), ("--tokenizer", str(TINY_LLAMA))):
        with (
            FakeEngine("eyes", render=render) as engine,
            Frontend("--no-kv-events", *flags) as frontend,
        ):
            frontend.add(engine.url)
            assert frontend.http.call("POST", CHAT, ask("cat"))[0] == 200
            overlaps = [
                list(frontend.overlaps(ask(image), "overlap_blocks").values())
                for image in ("cat", "dog")
            ]
            # 80 tokens are five blocks; the first one ends before the image.
            assert overlaps == [[5], [1]], flags
            assert frontend.explain(ask("dog"))["prompt_tokens"] == 80


def test_an_engine_that_renders_nothing_still_gets_its_images() -> None:
    with FakeEngine("eyes") as engine, Frontend("--no-kv-events") as frontend:
        frontend.add(engine.url)
        assert frontend.http.call("POST", CHAT, ask("cat"))[0] == 200
        assert frontend.explain(ask("cat"))["prompt_tokens"] is None
        name = 'kvflash_untokenized_requests_total{cause="not_text"}'
        assert frontend.metric(name) == 2
