"""Calls engines that only speak OpenAI's API as if they were workers of the runtime.

The events of POST {url}/v1/completions become a worker's items, with text only if the engine sends
no token ids. A reader that stops closes the connection, which ends the request at the engine.
"""

import json
import operator
from collections.abc import Mapping
from typing import Any

import aiohttp

from kvflash.errors import DecodeError, InvalidArgumentError, TransportError
from kvflash.runtime.frame import Failure, Request, pack
from kvflash.runtime.http import HttpClient, HttpReply, id_in_header
from kvflash.runtime.plane import FailedError

EVENTS = "text/event-stream"
RANK = "x-data-parallel-rank"
# Sent by routers that do not know the model's name.
UNKNOWN_MODEL = "unknown"
#: Request fields whose options engines accept under the same names.
_OPTIONS = ("stop_conditions", "sampling_options", "output_options", "extra_args")
#: Of these, options that a worker handles itself and an engine must not see.
_NOT_SENT = ("stop_token_ids_hidden", "formatted_prompt")
#: Fields that options must not override.
_OURS = ("prompt", "stream", "stream_options", "return_token_ids")

_CODES = {
    400: "invalid",
    404: "not_found",
    408: "deadline",
    413: "invalid",
    422: "invalid",
    429: "overloaded",
    502: "unreachable",
    503: "unreachable",
    504: "deadline",
}


def completion(payload: Any) -> dict[str, Any]:
    """Build the body of POST /v1/completions for a request of the runtime.

    The payload has token_ids and the other fields that a worker receives, or is just a list of ids.
    Without ids, or with more than one answer requested, it raises InvalidArgumentError.
    """
    request = {"token_ids": payload} if isinstance(payload, list | tuple) else payload
    tokens = request.get("token_ids") if isinstance(request, dict) else None
    if not isinstance(tokens, list | tuple) or not tokens:
        raise InvalidArgumentError(
            "an engine that speaks OpenAI's API is asked with token_ids, a list of at least one, "
            f"got {tokens!r}"
        )
    body: dict[str, Any] = {}
    for field in _OPTIONS:
        body |= {
            name: value
            for name, value in _map(request, field).items()
            if value is not None and name not in _NOT_SENT
        }
    for name in ("n", "best_of"):
        if body.get(name, 1) != 1:
            raise InvalidArgumentError(
                f"{name} must be 1, got {body[name]!r}: items are those of one answer"
            )
    for name in _OURS:
        body.pop(name, None)
    # The two ways in which a prefill worker hands over.
    body |= _map(request, "bootstrap_info")
    prefilled = _map(_map(request, "prefill_result"), "disaggregated_params")
    if prefilled.get("kv_transfer_params") is not None:
        body["kv_transfer_params"] = prefilled["kv_transfer_params"]
    # Engines serve an adapter as a separate model.
    model = request.get("lora_name") or request.get("model")
    if model and model != UNKNOWN_MODEL:
        body["model"] = model
    if request.get("cache_salt"):
        body["cache_salt"] = request["cache_salt"]
    body |= {"prompt": list(tokens), "return_token_ids": True}
    if _map(body, "kv_transfer_params").get("do_remote_decode"):
        # Engines return the handover parameters only in unstreamed responses.
        return body | {"stream": False}
    return body | {"stream": True, "stream_options": {"include_usage": True}}


def _map(request: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = request.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(f"{field} must be an object, got {value!r}")
    return value


class OpenAiClient(HttpClient):
    """Calls engines over OpenAI's API."""

    # Common engines close idle connections after 5 s; close ours earlier.
    idle_s_max = 4.0

    async def ask(self, transport: dict[str, Any], request: Request) -> HttpReply:
        """Also refuses a request without token ids, or with a bad id."""
        wanted = completion(request.payload)
        try:
            # json does not encode numpy's integers.
            body = json.dumps(wanted, default=operator.index, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"request can't be written as JSON: {error}") from error
        if len(body) > self.limits.frame_bytes_max:
            raise InvalidArgumentError(
                f"request may have at most {self.limits.frame_bytes_max} bytes, got {len(body)}"
            )
        name = id_in_header(request.id)
        headers = {"content-type": "application/json", "x-request-id": name}
        rank = request.payload.get("dp_rank") if isinstance(request.payload, dict) else None
        if rank is not None:
            headers[RANK] = str(rank)
        url = f"{transport['url']}/v1/completions"
        return OpenAiReply(self, url, headers, body, is_whole=not wanted["stream"])


class OpenAiReply(HttpReply):
    """An engine's answer on its way."""

    def __init__(
        self, client: HttpClient, url: str, headers: dict[str, str], body: bytes, *, is_whole: bool
    ) -> None:
        super().__init__(client, url, headers, body)
        self._is_whole = is_whole
        self._event_bytes_max = client.limits.frame_bytes_max
        #: Lines that were received and not read; the last one may be incomplete.
        self._buffer = bytearray()
        #: The item with the answer's end; its usage arrives after it.
        self._last: dict[str, Any] | None = None
        self._is_over = False

    async def _receive(self) -> bytes | None:
        while not self._is_over:
            event = await self._event()
            self._is_over = event is None
            try:
                item = self._last if event is None else self._item(event)
                if item is not None:
                    return pack(item, "item")
            except (TypeError, InvalidArgumentError) as error:
                # JSON also has numbers that msgpack lacks.
                raise DecodeError(f"an event has a field of another type: {error}") from error
        await self._finish()
        return None

    def _item(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """The item that a worker would yield for an event; None if there is none, or not yet."""
        usage = event.get("usage")
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else {}
        if not isinstance(choice, dict):
            raise DecodeError(f"a choice must be an object, got {choice!r}")
        # Only usage is expected after the end; other events are passed on all the same.
        item = _joined(self._last or {"token_ids": [], "text": "", "finish_reason": None}, choice)
        self._last = None
        if isinstance(usage, dict):
            item["completion_usage"] = usage
        handed = event.get("kv_transfer_params")
        if handed is not None:
            item["disaggregated_params"] = {"kv_transfer_params": handed}
        if item["finish_reason"] is not None and "completion_usage" not in item:
            self._last = item
            return None
        # It contains something besides these three fields.
        has_more = item["finish_reason"] is not None or len(item) > 3
        return item if item["token_ids"] or item["text"] or has_more else None

    async def _event(self) -> dict[str, Any] | None:
        """The next event; None for the end. An error that the engine reports is a FailedError."""
        data = await (self._body() if self._is_whole else self._data())
        if data == b"[DONE]":
            return None
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"an event is not JSON: {error}") from error
        if not isinstance(event, dict):
            raise DecodeError(f"an event must be an object, got {event!r}")
        failure = _failure_in(event)
        if failure is not None:
            raise FailedError(failure)
        return event

    async def _body(self) -> bytes:
        """An unstreamed response's body; as in a stream, ``[DONE]`` comes after it."""
        while data := await self._read():
            self._buffer += data
            self._check_size(len(self._buffer), "an answer")
        body = bytes(self._buffer).strip()
        self._buffer.clear()
        return body or b"[DONE]"

    async def _data(self) -> bytes:
        """The data of the next event of a stream."""
        while True:
            line = await self._line()
            # Others are comments, event names, and what proxies send to keep a connection busy.
            if line.startswith(b"data:") and (data := line[5:].strip()):
                return data

    async def _line(self) -> bytes:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            self._check_size(searched)
            data = await self._read()
            if not data and not self._buffer:
                raise TransportError("the engine's answer broke off before its end", was_sent=True)
            # Some engines do not terminate their last line.
            self._buffer += data or b"\n"
        self._check_size(end)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _check_size(self, size: int, what: str = "an event") -> None:
        if size > self._event_bytes_max:
            raise DecodeError(f"{what} may have at most {self._event_bytes_max} bytes")

    def _refusal(self, status: int, fields: dict[str, Any], said: str) -> Failure:
        return _failure_in(fields, status) or _failure(status, said)

    def _is_answer(self, response: aiohttp.ClientResponse) -> bool:
        wanted = "application/json" if self._is_whole else EVENTS
        return response.status == 200 and response.content_type == wanted


def _joined(item: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    text, logprobs = choice.get("text"), choice.get("logprobs")
    joined = item | {
        "token_ids": [*item["token_ids"], *(choice.get("token_ids") or ())],
        "text": item["text"] + (text if isinstance(text, str) else ""),
        "finish_reason": choice.get("finish_reason") or item["finish_reason"],
    }
    if choice.get("stop_reason") is not None:
        joined["stop_reason"] = choice["stop_reason"]
    if isinstance(logprobs, dict) and logprobs.get("token_logprobs"):
        joined["log_probs"] = [*item.get("log_probs", ()), *logprobs["token_logprobs"]]
    return joined


def _failure_in(event: dict[str, Any], status: int | None = None) -> Failure | None:
    """The error in an event or a body, in OpenAI's format or that of older engines."""
    error = event.get("error")
    if error is None and event.get("object") == "error":
        error = event
    if error is None and status is not None and status != 200:
        # FastAPI's own error format.
        error = event.get("detail")
    if error is None:
        return None
    fields = error if isinstance(error, dict) else {}
    code, message = fields.get("code"), str(fields.get("message", error))
    of_event = code if isinstance(code, int) else 500
    return _failure(status or of_event, message, can_retry=status is not None)


def _failure(status: int, message: str, *, can_retry: bool = True) -> Failure:
    code = _CODES.get(status, "internal")
    # The request has not begun: another instance may have room for it, or the adapter.
    is_another_asked = code in ("not_found", "overloaded", "unreachable")
    return Failure(code, message, can_retry and is_another_asked)


make_client = OpenAiClient
