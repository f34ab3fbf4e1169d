"""Refusals: a status and an error body, in OpenAI's form."""

from typing import Any, NoReturn

Body = dict[str, Any]


class ApiError(Exception):
    """A request that is answered with an OpenAI error body; ``param`` names the faulty field."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: Body = {
            "error": {"message": message, "type": kind, "param": param, "code": status},
        }


def refuse(message: str, param: str | None = None) -> NoReturn:
    """Refuse a request as malformed, with status 400."""
    raise ApiError(400, "BadRequestError", message, param)
