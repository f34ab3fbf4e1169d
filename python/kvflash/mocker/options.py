"""Requirements on an answer, from a chat or a completion, to which other APIs are converted."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvflash.mocker.fields import (
    Body,
    boolean,
    inner,
    integer,
    is_integer,
    is_object,
    listed,
    read,
    refuse,
    shown,
    texts,
)

STOPS_MAX = 64
CHOICES_MAX = 32
LOGPROBS_MAX = 20
CALLS_MAX = 16
# JSON mode without a schema.
ANY_OBJECT = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called, and the schema of its arguments."""

    name: str
    parameters: object


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Options of an answer."""

    tools: Sequence[Tool] = ()  # One of them is called; none: the answer is text.
    calls_each: bool = False  # Call the first tools, each once, instead of one of all.
    is_named: bool = False  # The request named the tool: then the answer ends with `stop`.
    schema: object = None  # JSON schema of the text.
    stop: Sequence[str] = ()  # Texts that end the answer.
    stop_token_ids: frozenset[int] = frozenset()
    has_stop: bool = False  # The stop text is part of the answer.
    seed: int | None = None  # Selects another answer.
    choices: int = 1  # Number of answers to the prompt.
    logprobs: int | None = None  # Likely tokens besides each token; None: no log probabilities.
    has_echo: bool = False  # The prompt is part of the answer.
    text_tokens: int | None = None  # Tokens after which text ends by itself.


def parse_options(body: Body, *, is_chat: bool, text_tokens: int | None) -> AnswerOptions:
    """Read the options of a chat or a completion; refuses wrong ones."""
    tools, is_named = _tools_to_call(body) if is_chat else ((), False)
    return AnswerOptions(
        tools=tools,
        # A client that does not force a tool gets a single call, which any client understands.
        calls_each=body.get("parallel_tool_calls") is True and not is_named,
        is_named=is_named,
        schema=_schema(body),
        stop=_stop(body),
        stop_token_ids=frozenset(listed(body, "stop_token_ids", is_integer, "a list of token ids")),
        has_stop=boolean(body, "include_stop_str_in_output"),
        seed=read(body, "seed", is_integer, "an integer"),
        choices=integer(body, "n", 1, CHOICES_MAX, 1),
        logprobs=_logprobs(body, is_chat=is_chat),
        has_echo=not is_chat and boolean(body, "echo"),
        text_tokens=text_tokens,
    )


def parse_tools(body: Body) -> list[Tool]:
    """The tools of a chat; refuses malformed ones."""
    tools = []
    for at, tool in enumerate(listed(body, "tools", is_object, "a list of objects")):
        function = tool.get("function")
        if not is_object(function) or tool.get("type", "function") != "function":
            refuse(f"tools[{at}] must have type function and a function", "tools")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            refuse(f"tools[{at}].function.name must be a non-empty string", "tools")
        if parameters is not None and not isinstance(parameters, dict):
            refuse(f"tools[{at}].function.parameters must be a JSON schema", "tools")
        # A function without parameters is called with an empty object.
        tools.append(Tool(name, {"type": "object", **(parameters or {})}))
    return tools


def _tools_to_call(body: Body) -> tuple[Sequence[Tool], bool]:
    """The tools of which one is called, and whether the request named it."""
    tools, choice = parse_tools(body), body.get("tool_choice")
    if choice == "none" or (choice is None and not tools):
        return (), False
    if not tools:
        refuse("tool_choice needs tools", "tool_choice")
    if choice in (None, "auto"):
        return (() if _has_results(body) else tools), False
    if choice == "required":
        return tools, False
    named = [tool for tool in tools if tool.name == inner(choice, "function", "name")]
    if not named:
        names = ", ".join(tool.name for tool in tools)
        refuse(
            f"tool_choice must be none, auto, required or a function among {names}, got "
            f"{shown(choice, 200)}",
            "tool_choice",
        )
    return named[:1], True


def _has_results(body: Body) -> bool:
    """Whether the chat continues after tool results; then the answer is text, so agents end."""
    roles = [message["role"] for message in body["messages"]]
    return next((one for one in reversed(roles) if one in ("assistant", "tool")), None) == "tool"


def _schema(body: Body) -> object:
    form = body.get("response_format")
    kind = inner(form, "type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    schema = inner(form, "json_schema", "schema")
    if kind != "json_schema" or not is_object(schema):
        refuse(
            "response_format must have type text, json_object, or json_schema with a "
            "json_schema.schema",
            "response_format",
        )
    return schema


def _stop(body: Body) -> Sequence[str]:
    stops = texts(body, "stop")
    if "" in stops:
        refuse("stop must be a non-empty string or a list of them", "stop")
    if len(stops) > STOPS_MAX:
        refuse(f"stop may have at most {STOPS_MAX} strings, got {len(stops)}", "stop")
    return tuple(stops)


def _logprobs(body: Body, *, is_chat: bool) -> int | None:
    if not is_chat:
        # In completions the field itself is the number; 0: the token alone.
        found: int | None = integer(body, "logprobs", 0, LOGPROBS_MAX)
        return found
    count: int = integer(body, "top_logprobs", 0, LOGPROBS_MAX, 0)
    if not boolean(body, "logprobs"):
        if count:
            refuse("top_logprobs needs logprobs", "top_logprobs")
        return None
    return count
