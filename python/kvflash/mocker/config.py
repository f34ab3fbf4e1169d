"""Every option of the mocker, with its default and legal values."""

from dataclasses import dataclass
from typing import Literal

from kvflash.errors import ConfigError

EventEra = Literal["positional", "tagged"]
# Which part of a request an engine computes: all of it, its prompt, or its answer.
Role = Literal["both", "prefill", "decode"]
PortChoice = int | Literal["auto"]

PORT_MAX = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class MockerConfig:
    """Options of one mocker process, shared by all its workers.

    Attributes:
        host: Interface the HTTP and ZMQ sockets bind to.
        port: First HTTP port, worker i listens on port + i; 0 picks free ports.
        num_workers: Engines in this process.
        model_name: Name under which the model is served.
        block_size: Tokens per KV block.
        num_gpu_blocks: Capacity of the KV cache of one worker. Unit: blocks.
        max_num_seqs: Requests that run at the same time.
        max_num_batched_tokens: Tokens computed in one pass.
        max_model_len: Prompt plus output tokens of one request; None means the size of the cache.
        watermark: Share of the cache that admission keeps free for decoding, in [0, 1).
        speedup_ratio: Modelled time divided by real time, > 0.
        enable_prefix_caching: Reuse full blocks across requests and publish block events.
        enable_chunked_prefill: Cut a prompt that does not fit into a pass.
        max_waiting: Requests that may wait for admission; more are refused with 429.
        zmq_events_port: First event port, 0 for no events, "auto" for free ports.
        zmq_replay_port: First replay port, 0 for no replay, "auto" for free ports.
        event_era: Wire shape of block events: "positional" arrays or "tagged" maps.
        event_topic: ZMQ topic of every event batch.
        replay_buffer: Event batches kept for replay.
        data_parallel_rank: Rank written into every event batch.
        startup_time_s: Real seconds before a worker is ready, as loading weights would take.
        tokenizer: Folder of a Hugging Face tokenizer; None means UTF-8 bytes.
        lora_adapters: Names of LoRA adapters that requests may name as their model.
        drain_timeout_s: Real seconds for running requests to end after SIGTERM.
        endpoint: Endpoint of the runtime to serve, namespace.component.endpoint; None serves HTTP.
        event_plane: Transport of events with `endpoint`: "zmq", or "nats" for the component's
            stream.
        enable_local_indexer: With nats: use the worker's local index instead of the stream.
        kv_events: Publish block events (with `endpoint`; without it the ports decide).
        data_parallel_size: Ranks of one worker, each with its own cache and scheduler; needs
            `endpoint`.
        role: The part of a request that each worker computes.
        bootstrap_ports: A port for each prefill worker, where decode workers wait for its results;
            without ports, results are handed over in answers.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    num_workers: int = 1
    model_name: str = "mock-model"
    block_size: int = 64
    num_gpu_blocks: int = 16384
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    watermark: float = 0.01
    speedup_ratio: float = 1.0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_waiting: int = 4096
    zmq_events_port: PortChoice = 0
    zmq_replay_port: PortChoice = 0
    event_era: EventEra = "tagged"
    event_topic: str = "kv-events"
    replay_buffer: int = 10_000
    data_parallel_rank: int = 0
    startup_time_s: float = 0.0
    tokenizer: str | None = None
    lora_adapters: tuple[str, ...] = ()
    drain_timeout_s: float = 20.0
    endpoint: str | None = None
    kv_events: bool = True
    event_plane: str = "zmq"
    enable_local_indexer: bool = False
    data_parallel_size: int = 1
    role: Role = "both"
    bootstrap_ports: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ConfigError: An option is out of range; names the flag and its legal values.
        """
        for name, least in _AT_LEAST:
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{flag(name)} must be at least {least}, got {value}")
        for name in ("port", "zmq_events_port", "zmq_replay_port"):
            self._check_port(name)
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"--watermark must be in [0, 1), got {self.watermark}")
        # `not >` also refuses NaN.
        if not 0.0 < self.speedup_ratio < float("inf"):
            raise ConfigError(f"--speedup-ratio must be above 0, got {self.speedup_ratio}")
        if self.event_era not in ("positional", "tagged"):
            raise ConfigError(f"--event-era must be positional or tagged, got {self.event_era!r}")
        if self.zmq_replay_port != 0 and self.zmq_events_port == 0:
            raise ConfigError("--zmq-replay-port needs --zmq-events-port")
        if self.event_plane not in ("zmq", "nats"):
            raise ConfigError(f"--event-plane must be zmq or nats, got {self.event_plane!r}")
        if self.event_plane == "nats" and self.endpoint is None:
            raise ConfigError("--event-plane nats needs --endpoint: streams are named by it")
        names = (self.model_name, *self.lora_adapters)
        if "" in names or len(set(names)) != len(names):
            raise ConfigError(
                f"--model-name and --lora-adapters must be distinct, non-empty names, got {names}"
            )
        self._check_lengths()
        self._check_roles()

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
                f"{flag(name)} must be in 0..{last} for {self.num_workers} workers, got {port!r}"
            )

    def _check_roles(self) -> None:
        if self.role not in ("both", "prefill", "decode"):
            raise ConfigError(f"role must be both, prefill or decode, got {self.role!r}")
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
                raise ConfigError(f"--bootstrap-ports must be in 1..{PORT_MAX}, got {port}")

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
        if self.max_model_len is not None and self.max_model_len > longest:
            limits = "--num-gpu-blocks, --block-size and --watermark"
            if not self.enable_chunked_prefill:
                limits += ", and --max-num-batched-tokens with --no-enable-chunked-prefill"
            raise ConfigError(
                f"--max-model-len must be at most {longest} (limited by {limits}), "
                f"got {self.max_model_len}"
            )


def flag(name: str) -> str:
    """Name of an option's command line flag."""
    return "--" + _FLAGS.get(name, name).replace("_", "-")


_FLAGS = {"startup_time_s": "startup-time", "drain_timeout_s": "drain-timeout"}

_AT_LEAST: tuple[tuple[str, int], ...] = (
    ("num_workers", 1),
    ("block_size", 1),
    ("num_gpu_blocks", 1),
    ("max_num_seqs", 1),
    ("max_num_batched_tokens", 1),
    ("max_waiting", 1),
    ("replay_buffer", 1),
    ("data_parallel_rank", 0),
    ("data_parallel_size", 1),
    ("startup_time_s", 0),
    ("drain_timeout_s", 0),
)
