"""Rules for schemathesis on the frontend that a schema can't express."""

from __future__ import annotations

from typing import Any

import schemathesis

import openapi_hooks  # noqa: F401 - registers a hook that keeps whole numbers as such


@schemathesis.hook
def before_call(ctx: schemathesis.HookContext, case: schemathesis.Case, kwargs: Any) -> None:
    """Workers are searched on this machine, which has none; uploads have another type."""
    if case.path == "/explain" and "/audio/" in str((case.query or {}).get("path")):
        case.query["path"] = "/v1/embeddings"
    if case.path == "/explain" and isinstance(case.body, dict):
        # Without a path it takes chats and completions only.
        is_told = bool(case.body.keys() & {"messages", "prompt"})
        case.query = case.query if is_told else {"path": "/v1/responses", **(case.query or {})}
    if case.path == "/workers" and isinstance(case.body, dict):
        case.body["url"] = "http://127.0.0.1:1"
        for field in ("events", "replay"):
            if isinstance(case.body.get(field), str) and case.body[field].startswith("tcp://"):
                case.body[field] = "tcp://127.0.0.1:1"
        if case.body.get("events") is None:
            # There is nothing to replay.
            case.body.pop("replay", None)
