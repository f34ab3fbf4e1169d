"""What engines reuse of growing conversations behind a router.

``python benches/engines.py http://HOST:PORT``: any OpenAI-compatible router will do, and any engine
that counts ``cached_tokens`` (vLLM: ``--enable-prompt-tokens-details``). ``--engines`` empties
their caches first (vLLM: ``VLLM_SERVER_DEV_MODE=1``). Prints one line of JSON: the share of prompt
tokens that the engines took from their caches, by their own count, and the client's latencies.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import urllib.request
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

WORDS = ["amber", "basin", "cedar", "delta", "ember", "field", "grove", "haven", "inlet", "knoll"]
SYSTEM_PROMPTS = 3


def words(seeded: random.Random, low: int, high: int) -> str:
    """At least ``low`` and less than ``high`` words."""
    return " ".join(seeded.choices(WORDS, k=seeded.randrange(low, high)))


def post(url: str, body: dict[str, Any]) -> Any:
    """The answer's JSON; nothing for an empty answer."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        answer = response.read()
    return json.loads(answer) if answer else None


def turn(args: argparse.Namespace, prompt: str) -> tuple[str, tuple[int, int, float]]:
    """The answer; its prompt tokens, those from a cache, and seconds."""
    body = {"model": args.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    begun = time.perf_counter()
    answer = post(f"{args.url}/v1/completions", body | {"ignore_eos": True})
    took = time.perf_counter() - begun
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return answer["choices"][0]["text"].strip() or "yes", (usage["prompt_tokens"], cached, took)


def play(args: argparse.Namespace) -> dict[str, Any]:
    """Play all conversations; whoever has waited longest has the next turn."""
    for engine in args.engines:
        post(f"{engine}/reset_prefix_cache", {})
    seeded = random.Random(args.seed)
    systems = [words(seeded, 80, 160) for _ in range(SYSTEM_PROMPTS)]
    line = [(seeded.choice(systems), 0) for _ in range(args.conversations)]
    running: dict[Future[tuple[str, tuple[int, int, float]]], tuple[str, int]] = {}
    seen: list[tuple[int, int, float]] = []
    begun = time.perf_counter()
    with ThreadPoolExecutor(args.concurrency) as pool:
        while line or running:
            while line and len(running) < args.concurrency:
                text, turns = line.pop(0)
                prompt = f"{text} {words(seeded, 8, 40)}"
                running[pool.submit(turn, args, prompt)] = (prompt, turns + 1)
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                prompt, turns = running.pop(ended)
                answer, figures = ended.result()
                seen.append(figures)
                if turns < args.turns:
                    line.append((f"{prompt} {answer}", turns))
    tokens = sum(one[0] for one in seen)
    times = sorted(one[2] for one in seen)
    return {
        "requests": len(seen),
        "prompt_tokens": tokens,
        "reused": round(sum(one[1] for one in seen) / tokens, 4),
        "p50_ms": round(1e3 * times[len(times) // 2], 1),
        "p99_ms": round(1e3 * times[len(times) * 99 // 100], 1),
        "wall_s": round(time.perf_counter() - begun, 1),
    }


def main() -> None:
    """Parse the command line, play, and print."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("url", help="the router, or one engine")
    flags.add_argument("--engines", nargs="*", default=[], help="URLs of engines to empty first")
    flags.add_argument("--model", default="tiny-llama")
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--conversations", type=int, default=60)
    flags.add_argument("--turns", type=int, default=8)
    flags.add_argument("--concurrency", type=int, default=8)
    print(json.dumps(play(flags.parse_args())))


if __name__ == "__main__":
    main()
