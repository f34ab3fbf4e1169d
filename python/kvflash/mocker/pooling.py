"""Embeddings, ranks and classes: figures derived from the tokens, at no cost."""

import base64
import random
import struct
import time
import uuid
from collections.abc import Sequence
from typing import Any

from kvflash.mocker.blocks import output_seed
from kvflash.mocker.fields import Body, integer, one_of, refuse, texts
from kvflash.mocker.protocol import parse_token_ids
from kvflash.mocker.tokenizer import Tokenizer

DIMENSIONS = 16
DIMENSIONS_MAX = 4096
TOP_MAX = 2**31 - 1
CLASSES = ("LABEL_0", "LABEL_1")


def embeddings(body: Body, model: str, tokenizer: Tokenizer) -> Body:
    """The answer of /v1/embeddings."""
    prompts = _prompts(body, tokenizer)
    count = integer(body, "dimensions", 0, DIMENSIONS_MAX) or DIMENSIONS
    form = one_of(body, "encoding_format", ("float", "base64"))
    vectors: Any = [_vector(prompt, count) for prompt in prompts]
    if form == "base64":
        packed = (struct.pack(f"<{count}f", *vector) for vector in vectors)
        vectors = [base64.b64encode(data).decode() for data in packed]
    data = [{"object": "embedding", "embedding": vector} for vector in vectors]
    return _list("embd", model, prompts, data)


def rerank(body: Body, model: str, tokenizer: Tokenizer) -> Body:
    """The answer of /rerank, best first."""
    query, documents = body.get("query"), _texts(body, "documents")
    if not isinstance(query, str):
        refuse("query must be text", "query")
    top_n = integer(body, "top_n", 0, TOP_MAX) or len(documents)
    pairs = [_encode(query + document, tokenizer) for document in documents]
    scores = [_vector(pair, 1)[0] for pair in pairs]
    ranked = sorted(range(len(documents)), key=scores.__getitem__, reverse=True)[:top_n]
    results = [
        {"index": at, "document": {"text": documents[at]}, "relevance_score": scores[at]}
        for at in ranked
    ]
    tokens = sum(map(len, pairs))
    used = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": f"score-{uuid.uuid4().hex}", "model": model, "usage": used, "results": results}


def score(body: Body, model: str, tokenizer: Tokenizer) -> Body:
    """The answer of /score: `text_1` against each of `text_2`."""
    first, second = _texts(body, "text_1"), _texts(body, "text_2")
    if len(first) not in (1, len(second)):
        refuse("text_1 must be one text, or as many as text_2", "text_1")
    first = first * (len(second) // len(first))
    pairs = [_encode(one + other, tokenizer) for one, other in zip(first, second, strict=True)]
    data = [{"object": "score", "score": _vector(pair, 1)[0]} for pair in pairs]
    return _list("score", model, pairs, data)


def classify(body: Body, model: str, tokenizer: Tokenizer) -> Body:
    """The answer of /classify."""
    prompts = _prompts(body, tokenizer)
    data = []
    for prompt in prompts:
        share = _vector(prompt, 1)[0]
        label = CLASSES[0] if share > 0.5 else CLASSES[1]
        data.append({"label": label, "probs": [share, 1 - share], "num_classes": len(CLASSES)})
    return _list("classify", model, prompts, data)


def pooling(body: Body, model: str, tokenizer: Tokenizer) -> Body:
    """The answer of /pooling."""
    prompts = _prompts(body, tokenizer)
    data = [{"object": "pooling", "data": _vector(prompt, DIMENSIONS)} for prompt in prompts]
    return _list("pool", model, prompts, data)


def _list(kind: str, model: str, prompts: Sequence[Sequence[int]], data: Sequence[Body]) -> Body:
    """The figures of all prompts, numbered."""
    tokens = sum(map(len, prompts))
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        "data": [{"index": index, **one} for index, one in enumerate(data)],
    }


def _vector(token_ids: Sequence[int], count: int) -> list[float]:
    rng = random.Random(output_seed(None, token_ids))
    return [rng.random() for _ in range(count)]


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=True)


def _prompts(body: Body, tokenizer: Tokenizer) -> list[list[int]]:
    told: Any = body.get("input")
    # One prompt: text, or token ids.
    if isinstance(told, str) or (isinstance(told, list) and told and type(told[0]) is int):
        told = [told]
    if not isinstance(told, list) or not told:
        refuse("input must be text, token ids, or a non-empty list of these", "input")
    wanted = "one string or one list of token ids"
    return [
        _encode(one, tokenizer) if isinstance(one, str) else parse_token_ids(one, "input", wanted)
        for one in told
    ]


def _texts(body: Body, name: str) -> list[str]:
    return texts(body, name) or refuse(f"{name} must have at least one string", name)
