"""What handlers share: JSON in and out, and the only table from errors to statuses."""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from aiohttp import web

from kvflash.errors import ClosedError, OverloadedError, TransportError
from kvflash.mocker import messages
from kvflash.mocker.fields import ApiError, Body, refuse
from kvflash.mocker.protocol import parse_json

RETRY_AFTER_S = 1
# A request with this header is answered with the status in it.
ERROR_HEADER = "x-mocker-status"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def at_once(answer: Callable[[Body], Any]) -> Handler:
    """A handler that answers a JSON body without generating."""

    async def handle(request: web.Request) -> web.Response:
        return web.json_response(answer(parse_json(await request.read())))

    return handle


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert every refusal to an error body of its API: the only table of statuses."""
    headers: dict[str, str] = {}
    try:
        if status := request.headers.get(ERROR_HEADER):
            _raise_for(status)
        return await handler(request)
    except ApiError as error:
        answer = error
    except OverloadedError as error:
        answer = ApiError(429, "TooManyRequestsError", str(error))
        headers["Retry-After"] = str(RETRY_AFTER_S)
    except TransportError as error:
        # SGLang's decode worker answers this way when its prefill fails.
        answer = ApiError(500, "InternalServerError", str(error))
    except ClosedError as error:
        answer = ApiError(503, "ServiceUnavailableError", str(error))
    except web.HTTPRequestEntityTooLarge as error:
        answer = ApiError(413, "BadRequestError", error.text or "the body is too large")
    except web.RequestPayloadError as error:
        # For example a plain body declared as compressed: its end can't be found any more.
        request.content.feed_eof()
        headers["Connection"] = "close"
        reason = str(error).splitlines()[-1].strip()
        answer = ApiError(400, "BadRequestError", f"the body cannot be read: {reason}")
    except RecursionError:
        # For example a value that could just be parsed, but not be written into the answer.
        answer = ApiError(400, "BadRequestError", "the request body is nested too deeply")
    except web.HTTPNotFound:
        answer = ApiError(404, "NotFoundError", "Not Found")  # as in vLLM
    except web.HTTPMethodNotAllowed as error:
        answer = ApiError(405, "BadRequestError", f"{request.path} does not take {error.method}")
        headers["Allow"] = error.headers["Allow"]
    is_message = request.path.startswith("/v1/messages")
    body = messages.error_body(answer) if is_message else answer.body
    return web.json_response(body, status=answer.status, headers=headers)


def _raise_for(status: str) -> NoReturn:
    if not status.isdecimal() or len(status) > 3 or not 400 <= int(status) <= 599:
        refuse(f"{ERROR_HEADER} must be in 400..=599, got {status!r}")
    raise ApiError(int(status), "MockedError", f"{ERROR_HEADER} asks for {status}")
