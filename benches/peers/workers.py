"""Four engines that answer at once, from one nginx: the same for every router."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODEL = "tiny-llama"

#: What routers ask besides completions, and what keeps them content.
ANSWERS = {
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1,
                   "owned_by": "vllm", "root": MODEL, "parent": None, "max_model_len": 8192}]},
    "/model_info": {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True},
    "/get_model_info": {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True},
    "/server_info": {"model_path": MODEL, "dp_size": 1, "tp_size": 1, "version": "0.5.0"},
    "/get_server_info": {"model_path": MODEL, "dp_size": 1, "tp_size": 1, "version": "0.5.0"},
    "/version": {"version": "0.32.0"},
    "/get_load": [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}],
    "/v1/loads": {"loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}]},
    "/loads": {"loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}]},
    "/tokenize": {"count": 64, "max_model_len": 8192, "tokens": list(range(100, 164))},
    "/v1/chat/completions/render": {"request_id": "r", "token_ids": list(range(100, 164))},
    "/health": {},
    "/health_generate": {},
}  # fmt: skip


def completion(port: int) -> dict[str, object]:
    """A finished chat of three tokens."""
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": f"from {port}"},
                     "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13},
    }  # fmt: skip


@contextmanager
def four_workers(first_port: int) -> Iterator[list[str]]:
    """Run nginx as four workers; yields their URLs."""
    if shutil.which("nginx") is None:
        raise SystemExit("nginx is not installed (Debian: apt-get install nginx-light)")
    with tempfile.TemporaryDirectory(prefix="kvflash-peers-") as name:
        folder = Path(name)
        servers = []
        ports = range(first_port, first_port + 4)
        for port in ports:
            routes = {**ANSWERS, "/v1/chat/completions": completion(port)}
            places = "\n".join(
                f"location = {path} {{ return 200 '{json.dumps(answer)}'; }}"
                for path, answer in routes.items()
            )
            servers.append(f"server {{ listen 127.0.0.1:{port} backlog=4096;\n{places} }}")
        paths = "".join(
            f"{kind}_temp_path {folder}/{kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        config = folder / "nginx.conf"
        config.write_text(
            f"worker_processes 1; daemon off; pid {folder}/pid; error_log stderr error;\n"
            "events { worker_connections 8192; }\n"
            "http { access_log off; default_type application/json; keepalive_timeout 300s;\n"
            "keepalive_requests 100000000; client_body_buffer_size 1m; client_max_body_size 64m;\n"
            + paths + "\n".join(servers)
            # The yardstick: nginx itself as a round-robin proxy before the same workers.
            + "\nupstream all { " + "".join(f"server 127.0.0.1:{p}; " for p in ports)
            + "keepalive 256; }\n"
            f"server {{ listen 127.0.0.1:{first_port + 9} backlog=4096; location / {{\n"
            "proxy_pass http://all; proxy_http_version 1.1;\n"
            "proxy_set_header Connection ''; }\n}\n}\n"
        )  # fmt: skip
        process = subprocess.Popen(["nginx", "-c", str(config)])
        try:
            yield [f"http://127.0.0.1:{port}" for port in ports]
        finally:
            process.terminate()
            process.wait()
