"""Write engine_names.json: names of blocks as vLLM makes them, with Python's own pickle and cbor2.

    python -m venv venv && venv/bin/pip install cbor2 xxhash
    venv/bin/python tests/vectors/make_engine_names.py

A case has either `tokens` or `token_run` [first, step, count]: token i is (first + i * step) mod
2**32. Strings go through JSON, so that no two of them are one object but those that CPython shares;
an engine gets them from msgpack, which shares the same ones.
"""

import hashlib
import json
import pathlib
import pickle

import cbor2
import xxhash

HASHES = {
    "sha256": lambda x: hashlib.sha256(pickle.dumps(x, protocol=5)).digest(),
    "sha256_cbor": lambda x: hashlib.sha256(cbor2.dumps(x, canonical=True)).digest(),
    "xxhash": lambda x: xxhash.xxh3_128_digest(pickle.dumps(x, protocol=5)),
    "xxhash_cbor": lambda x: xxhash.xxh3_128_digest(cbor2.dumps(x, canonical=True)),
}
WIDTHS = [0, 1, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 128256]
DIGEST = "00ff" * 16
LONG = {"text": "ä", "times": 300}


def media(*items):
    return [{"identifier": i, "offset": o, "length": n} for i, o, n in items]


CASES = [
    {"name": "widths of tokens", "unit": 1, "tokens": WIDTHS},
    *({"name": f"blocks of {n}", "unit": n, "tokens": WIDTHS + WIDTHS[::-1]} for n in range(2, 9)),
    *(
        {"name": f"blocks of {n}", "unit": n, "token_run": [5, 2654435761, 2 * n + 1]}
        for n in (16, 64, 256)
    ),
    {"name": "small tokens", "unit": 16, "token_run": [0, 7, 100]},
    {"name": "a model's tokens", "unit": 16, "token_run": [11, 1663, 100]},
    {"name": "shorter than a block", "unit": 16, "token_run": [1, 1, 15]},
    {"name": "one frame is just not full", "unit": 13098, "token_run": [65536, 1, 13098 * 2]},
    {"name": "one frame is just full", "unit": 13101, "token_run": [65536, 1, 13101 * 2]},
    {"name": "several frames", "unit": 30000, "token_run": [2**31, 1, 60001]},
    {"name": "seed 0", "seed": "0", "unit": 4, "token_run": [1, 1, 12]},
    {"name": "empty seed", "seed": "", "unit": 4, "token_run": [1, 1, 12]},
    {"name": "long seed", "seed": LONG, "unit": 4, "token_run": [1, 1, 12]},
    {
        "name": "seed without a frame",
        "seed": {"text": "s", "times": 70000},
        "unit": 4,
        "token_run": [1, 1, 12],
    },
    {"name": "salt", "unit": 16, "token_run": [1, 1, 48], "cache_salt": "tenant-a"},
    {"name": "empty salt", "unit": 4, "token_run": [1, 1, 8], "cache_salt": ""},
    {
        "name": "salt of 255 bytes",
        "unit": 4,
        "token_run": [1, 1, 8],
        "cache_salt": {"text": "s", "times": 255},
    },
    {
        "name": "salt of 256 bytes",
        "unit": 4,
        "token_run": [1, 1, 8],
        "cache_salt": {"text": "s", "times": 256},
    },
    {
        "name": "salt of 65535 bytes",
        "unit": 4,
        "token_run": [1, 1, 8],
        "cache_salt": {"text": "s", "times": 65535},
    },
    {
        "name": "salt without a frame",
        "unit": 4,
        "token_run": [1, 1, 8],
        "cache_salt": {"text": "s", "times": 65536},
    },
    {
        "name": "salt beyond ASCII",
        "unit": 4,
        "token_run": [1, 1, 8],
        "cache_salt": "Zürich 東京 😀",
    },
    {"name": "adapter", "unit": 16, "token_run": [1, 1, 48], "lora": ["sql", "/adapters/sql"]},
    {
        "name": "adapter and salt",
        "unit": 4,
        "token_run": [1, 1, 12],
        "lora": ["sql", "/adapters/sql"],
        "cache_salt": "sql",
    },
    {"name": "path equals name", "unit": 4, "token_run": [1, 1, 12], "lora": ["sql", "sql"]},
    {
        "name": "one character is one object",
        "unit": 4,
        "token_run": [1, 1, 12],
        "lora": ["a", "a"],
        "cache_salt": "a",
        "media": media(("a", 0, 2), ("b", 2, 4)),
    },
    {
        "name": "one Latin character is one object",
        "unit": 4,
        "token_run": [1, 1, 12],
        "lora": ["ÿ", "ÿ"],
        "cache_salt": "ÿ",
    },
    {
        "name": "one other character is two objects",
        "unit": 4,
        "token_run": [1, 1, 12],
        "lora": ["Ā", "Ā"],
        "cache_salt": "Ā",
    },
    {"name": "an item", "unit": 16, "token_run": [1, 1, 96], "media": media((DIGEST, 20, 40))},
    {
        "name": "an item of whole blocks",
        "unit": 16,
        "token_run": [1, 1, 96],
        "media": media((DIGEST, 16, 32)),
    },
    {
        "name": "two items in a block",
        "unit": 16,
        "token_run": [1, 1, 64],
        "media": media(("first", 2, 4), ("second", 8, 20)),
    },
    {
        "name": "five items in a block",
        "unit": 16,
        "token_run": [1, 1, 64],
        "media": media(*((f"item {i}", 3 * i, 3) for i in range(9))),
    },
    {
        "name": "items of one token each",
        "unit": 256,
        "token_run": [1, 1, 512],
        "media": media(*((f"item {i}", i, 1) for i in range(300))),
    },
    {
        "name": "an object that is fetched by a wide index",
        "unit": 256,
        "token_run": [1, 1, 256],
        "media": media(*((f"item {i}" if i < 150 else "é", i, 1) for i in range(152))),
    },
    {
        "name": "an item before the block by any width",
        "unit": 4096,
        "token_run": [1, 1, 81920],
        "media": media(("video", 100, 81000)),
    },
    {
        "name": "items behind the prompt",
        "unit": 4,
        "token_run": [1, 1, 8],
        "media": media(("first", 2, 4), ("second", 8, 2**32 - 1)),
    },
    {
        "name": "an item that lies in another",
        "unit": 4,
        "token_run": [1, 1, 32],
        "media": media(("outer", 1, 30), ("inner", 5, 2)),
    },
    {
        "name": "items that overlap",
        "unit": 4,
        "token_run": [1, 1, 32],
        "media": media(("first", 1, 9), ("second", 5, 13), ("third", 17, 3)),
    },
    {
        "name": "empty items",
        "unit": 4,
        "token_run": [1, 1, 16],
        "media": media(("first", 1, 0), ("second", 4, 0), ("third", 9, 3)),
    },
    {
        "name": "everything",
        "unit": 8,
        "token_run": [1, 1, 24],
        "lora": ["sql", "/adapters/sql"],
        "cache_salt": "tenant-a",
        "media": media(("first", 2, 3), ("second", 6, 9)),
        "embeds": [DIGEST] * 3,
    },
    {
        "name": "embeddings",
        "unit": 16,
        "token_run": [0, 0, 48],
        "embeds": ["11" * 32, "22" * 32, "33" * 32],
    },
]


def text(value):
    return value["text"] * value["times"] if isinstance(value, dict) else value


def tokens_of(case):
    if "tokens" in case:
        return case["tokens"]
    first, step, count = case["token_run"]
    return [(first + i * step) % 2**32 for i in range(count)]


def media_keys(items, start, end, at):
    """The keys of one block, and the item at which the next block goes on."""
    keys = []
    if not items or items[-1]["offset"] + items[-1]["length"] <= start:
        return keys, at
    while at < len(items) and items[at]["offset"] < end:
        behind = items[at]["offset"] + items[at]["length"]
        if behind > start:
            keys.append(("mm", items[at]["identifier"], items[at]["offset"] - start))
            if behind > end:
                break
        at += 1
    return keys, at


def names(case, digest):
    unit, tokens, at = case["unit"], tokens_of(case), 0
    lora, salt = case.get("lora"), text(case.get("cache_salt"))
    parent, out = digest(text(case.get("seed", "vllm-none-hash"))), []
    for start in range(0, len(tokens) - unit + 1, unit):
        keys = [("lora", *lora)] if lora else []
        items, at = media_keys(case.get("media"), start, start + unit, at)
        keys += items
        keys += [("cache_salt", salt)] if salt and start == 0 else []
        if "embeds" in case:
            keys.append(("prompt_embeds", bytes.fromhex(case["embeds"][start // unit])))
        parent = digest((parent, tuple(tokens[start : start + unit]), tuple(keys) or None))
        out.append(parent[-8:].hex())
    return out


def main():
    lines = []
    for case in CASES:
        case = json.loads(json.dumps(case))
        found = {name: names(case, digest) for name, digest in HASHES.items()}
        lines.append(json.dumps(case | {"names": found}, ensure_ascii=False))
    # One case a line: a diff of this file shows which cases changed.
    path = pathlib.Path(__file__).parent / "engine_names.json"
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{len(lines)} cases")


if __name__ == "__main__":
    main()
