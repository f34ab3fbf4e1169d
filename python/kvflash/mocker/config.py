"""Every option of the mocker, with its default and legal values."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from kvflash.errors import ConfigError

EventEra = Literal["positional", "tagged"]
# Which part of a request an engine computes: all of it, its prompt, or its answer.
Role = Literal["both", "prefill", "decode"]
PortChoice = int | Literal["auto"]

PORT_MAX = 65535
_AT_LEAST = {
    0: "data_parallel_rank startup_time_s drain_timeout_s",
    1: "num_workers block_size num_gpu_blocks max_num_seqs max_num_batched_tokens max_waiting "
    "replay_buffer data_parallel_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MockerConfig:
    """Options of one mocker process, shared by all its workers."""

    host: str = "127.0.0.1"  # Interface of the HTTP and ZMQ sockets.
    port: int = 8000  # First HTTP port, worker i listens on port + i; 0 picks free ports.
    num_workers: int = 1  # Engines in this process.
    model_name: str = "mock-model"
    block_size: int = 64  # Tokens per KV block.
    num_gpu_blocks: int = 16384  # Capacity of the KV cache of one worker, in blocks.
    max_num_seqs: int = 256  # Requests that run at the same time.
    max_num_batched_tokens: int = 8192  # Tokens computed in one pass.
    max_model_len: int | None = None  # Prompt plus output tokens; None: what the cache holds.
    watermark: float = 0.01  # Share of the cache that admission keeps free for decoding, in [0, 1).
    speedup_ratio: float = 1.0  # Modelled time divided by real time, > 0.
    enable_prefix_caching: bool = True  # Reuse full blocks across requests, and publish events.
    enable_chunked_prefill: bool = True  # Cut a prompt that does not fit into a pass.
    max_waiting: int = 4096  # Requests that may wait for admission; more are refused with 429.
    zmq_events_port: PortChoice = 0  # First event port, 0 for no events, "auto" for free ports.
    zmq_replay_port: PortChoice = 0  # First replay port, 0 for no replay, "auto" for free ports.
    event_era: EventEra = "tagged"  # Wire shape of events: "positional" arrays, "tagged" maps.
    event_topic: str = "kv-events"  # ZMQ topic of every event batch.
    replay_buffer: int = 10_000  # Event batches kept for replay.
    data_parallel_rank: int = 0  # Rank in every event batch.
    startup_time_s: float = 0.0  # Real seconds before a worker is ready, as if it loaded weights.
    tokenizer: str | None = None  # Folder of a Hugging Face tokenizer; None means UTF-8 bytes.
    lora_adapters: tuple[str, ...] = ()  # Adapters that requests may name as their model.
    drain_timeout_s: float = 20.0  # Real seconds for running requests to end after SIGTERM.
    endpoint: str | None = None  # namespace.component.endpoint of the runtime; None serves HTTP.
    kv_events: bool = True  # Publish block events with `endpoint`; without it the ports decide.
    event_plane: Literal["zmq", "nats"] = "zmq"  # Transport of events with `endpoint`.
    enable_local_indexer: bool = False  # With nats: the worker's own index instead of the stream.
    data_parallel_size: int = 1  # Ranks of one worker, each with its own cache; needs `endpoint`.
    role: Role = "both"
    bootstrap_ports: tuple[int, ...] = ()  # One per prefill worker, where decode workers wait.

    def __post_init__(self) -> None:
        for least, names in _AT_LEAST.items():
            for name in names.split():
                value = getattr(self, name)
                # `not >=` also refuses NaN.
                if not value >= least:
                    raise ConfigError(f"{_flag(name)} must be at least {least}, got {value}")
        for name in ("port", "zmq_events_port", "zmq_replay_port"):
            self._check_port(name)
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"--watermark must be in [0, 1), got {self.watermark}")
        if not 0.0 < self.speedup_ratio < float("inf"):
            raise ConfigError(
                f"--speedup-ratio must be above 0 and finite, got {self.speedup_ratio}"
            )
        if self.zmq_replay_port != 0 and self.zmq_events_port == 0:
            raise ConfigError("--zmq-replay-port needs --zmq-events-port")
        if self.event_plane == "nats" and self.endpoint is None:
            raise ConfigError("--event-plane nats needs --endpoint, which names the streams")
        models = (self.model_name, *self.lora_adapters)
        if "" in models or len(set(models)) != len(models):
            raise ConfigError(
                f"--model-name and --lora-adapters must be distinct, non-empty names, got {models}"
            )
        self._check_lengths()
        self._check_roles()
        self._check_overlap()

    @property
    def ranks(self) -> range:
        """The data parallel ranks of one worker."""
        return range(self.data_parallel_rank, self.data_parallel_rank + self.data_parallel_size)

    @property
    def admissible_blocks(self) -> int:
        """Blocks that admission may fill, excluding the watermark."""
        return int((1.0 - self.watermark) * self.num_gpu_blocks)

    @property
    def model_len(self) -> int:
        """Longest accepted sum of prompt and output of one request. Unit: tokens."""
        if self.max_model_len is not None:
            return self.max_model_len
        return self._longest_request()

    def _longest_request(self) -> int:
        fitting = self.admissible_blocks * self.block_size
        if self.enable_chunked_prefill:
            return fitting
        # Without chunks a prompt is computed in one pass, and so is a preempted request.
        return min(fitting, self.max_num_batched_tokens)

    def _check_port(self, name: str) -> None:
        port = getattr(self, name)
        if port == "auto" and name != "port":
            return
        last = PORT_MAX - self.num_workers * self.data_parallel_size + 1
        if not isinstance(port, int) or not 0 <= port <= last:
            raise ConfigError(
                f"{_flag(name)} must be in 0..={last} for {self.num_workers} workers, got {port!r}"
            )

    def _check_overlap(self) -> None:
        count = self.num_workers * self.data_parallel_size
        ranges = {"port": self.num_workers, "zmq_events_port": count, "zmq_replay_port": count}
        taken: list[tuple[int, str, int]] = []
        for name, size in ranges.items():
            port = getattr(self, name)
            is_used = name != "port" or self.endpoint is None
            if is_used and isinstance(port, int) and port:
                taken.append((port, _flag(name), size))
        taken += [(port, "--bootstrap-ports", 1) for port in self.bootstrap_ports]
        for (low, one, size), (high, other, other_size) in pairwise(sorted(taken)):
            if low + size > high:
                raise ConfigError(
                    f"{one} {low}..={low + size - 1} and {other} {high}..={high + other_size - 1} "
                    "overlap: HTTP takes a port per worker, events and replay one per worker and "
                    f"rank, so {other} must be {low + size} or more"
                )

    def _check_roles(self) -> None:
        if self.endpoint is None and self.data_parallel_size > 1:
            raise ConfigError("--data-parallel-size needs --endpoint")
        if self.data_parallel_size > 1 and self.data_parallel_rank > 0:
            raise ConfigError("--data-parallel-rank contradicts --data-parallel-size")
        ports = self.bootstrap_ports
        if not ports:
            return
        if self.role != "prefill":
            raise ConfigError("--bootstrap-ports needs --is-prefill-worker")
        if len(ports) != self.num_workers or len(set(ports)) != len(ports):
            raise ConfigError(
                f"--bootstrap-ports must name {self.num_workers} distinct ports, one for each of "
                f"--num-workers, got {','.join(map(str, ports))}"
            )
        for port in ports:
            if not 1 <= port <= PORT_MAX:
                raise ConfigError(f"--bootstrap-ports must be in 1..={PORT_MAX}, got {port}")

    def _check_lengths(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({self.max_num_seqs}): every running request decodes one token"
            )
        if self.admissible_blocks < 1:
            raise ConfigError(
                f"--watermark {self.watermark} leaves no block of --num-gpu-blocks "
                f"{self.num_gpu_blocks} to admit a request into"
            )
        # A longer request could never be admitted, and would block the queue for ever.
        longest = self._longest_request()
        if self.max_model_len is not None and not 1 <= self.max_model_len <= longest:
            limits = "--num-gpu-blocks, --block-size and --watermark"
            if not self.enable_chunked_prefill:
                limits += ", and --max-num-batched-tokens with --no-enable-chunked-prefill"
            raise ConfigError(
                f"--max-model-len must be in 1..={longest} (limited by {limits}), "
                f"got {self.max_model_len}"
            )


def _flag(name: str) -> str:
    """The flag of an option; units are in its help."""
    return "--" + name.removesuffix("_s").replace("_", "-")
