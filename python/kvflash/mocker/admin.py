"""Routes besides answers: models, tokens, health, and metrics under vLLM's names or `mocker:`."""

import time

from aiohttp import web

from kvflash.mocker.config import MockerConfig
from kvflash.mocker.engine import Engine
from kvflash.mocker.fields import ApiError, Body
from kvflash.mocker.middleware import at_once
from kvflash.mocker.protocol import decode, parse_model, parse_prompt, parse_token_ids
from kvflash.mocker.scheduler import Scheduler
from kvflash.mocker.tokenizer import Tokenizer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Admin:
    """The handlers of one worker that do not generate."""

    def __init__(self, engine: Engine, config: MockerConfig, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._config = config
        self._tokenizer = tokenizer
        self._started_s = time.time()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.get("/health", self.health),
            web.get("/version", self.version),
            web.get("/metrics", self.metrics),
            web.post("/tokenize", at_once(self.tokenize)),
            web.post("/detokenize", at_once(self.detokenize)),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
        ]

    async def models(self, _request: web.Request) -> web.Response:
        base = self._config.model_name
        cards = [
            {
                "id": name,
                "object": "model",
                "created": int(self._started_s),
                "owned_by": "kvflash",
                "root": name,
                "parent": None if name == base else base,
                "max_model_len": self._config.model_len,
            }
            for name in (base, *self._config.lora_adapters)
        ]
        return web.json_response({"object": "list", "data": cards})

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.is_alive else 503)

    async def version(self, _request: web.Request) -> web.Response:
        # Here, because it is slow to load, and few ask for it.
        from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

        try:
            text = version("kvflash")
        except PackageNotFoundError:
            # Run from a source tree.
            text = "unknown"
        return web.json_response({"version": text})

    async def metrics(self, _request: web.Request) -> web.Response:
        text = render(self._engine.scheduler, self._config, self._started_s)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    def tokenize(self, body: Body) -> Body:
        """POST /tokenize: {model, prompt} or {model, messages} to token ids."""
        parse_model(body, self._config)
        token_ids = parse_prompt(body, is_chat="messages" in body, tokenizer=self._tokenizer)
        length = self._config.model_len
        return {"count": len(token_ids), "max_model_len": length, "tokens": token_ids}

    def detokenize(self, body: Body) -> Body:
        """POST /detokenize: {model, tokens} to text."""
        parse_model(body, self._config)
        token_ids = parse_token_ids(body.get("tokens"), "tokens")
        return {"prompt": decode(token_ids, "tokens", self._tokenizer)}

    async def reset_prefix_cache(self, _request: web.Request) -> web.Response:
        """POST /reset_prefix_cache: 200, or 409 with nothing changed while a request runs."""
        if not self._engine.scheduler.reset():
            raise ApiError(409, "ConflictError", "a running request holds blocks; try again")
        return web.Response(status=200)


def render(scheduler: Scheduler, config: MockerConfig, started_s: float) -> str:
    """All metrics of one worker as Prometheus text 0.0.4; ``started_s`` is Unix time."""
    totals = scheduler.counters
    labels = f'{{engine="{config.data_parallel_rank}",model_name="{_escape(config.model_name)}"}}'
    info = (
        f'{{block_size="{config.block_size}",num_gpu_blocks="{config.num_gpu_blocks}",'
        f'enable_prefix_caching="{config.enable_prefix_caching}"}}'
    )
    samples: tuple[tuple[str, str, object], ...] = (
        ("vllm:num_requests_running", "Requests that hold blocks.", scheduler.running_count),
        ("vllm:num_requests_waiting", "Requests in the queue.", scheduler.waiting_count),
        ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", scheduler.kv_usage),
        ("vllm:prefix_cache_queries_total", "Prompt tokens looked up.", totals.prompt_tokens),
        ("vllm:prefix_cache_hits_total", "Prompt tokens found cached.", totals.cached_tokens),
        ("vllm:prompt_tokens_total", "Prompt tokens of admitted requests.", totals.prompt_tokens),
        ("vllm:generation_tokens_total", "Output tokens generated.", totals.generation_tokens),
        ("vllm:num_preemptions_total", "Preempted requests.", totals.preemptions),
        ("mocker:requests_finished_total", "Complete answers.", totals.finished_requests),
        (
            "mocker:requests_aborted_total",
            "Requests that ended because their client left.",
            totals.aborted_requests,
        ),
        ("mocker:requests_rejected_total", "Refused: queue full.", totals.rejected_requests),
        ("process_start_time_seconds", "Start of the process, Unix time.", f"{started_s:.3f}"),
        ("vllm:cache_config_info", "Shape of the KV cache.", 1),
    )
    special = {"process_start_time_seconds": "", "vllm:cache_config_info": info}
    lines: list[str] = []
    for name, help_text, value in samples:
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        lines.append(f"{name}{special.get(name, labels)} {value}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
