"""OpenAI's chats and completions: their bodies, and the chunks of their streams."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from kvflash.mocker.answer import DONE, Answer, event, usage_of
from kvflash.mocker.fields import Body
from kvflash.mocker.logprobs import Logprobs
from kvflash.mocker.plan import Choice, Delta, Plan, Step
from kvflash.mocker.protocol import GenerationParams, function_call


class Echo(NamedTuple):
    """An echoed prompt: its tokens, and the text of each."""

    token_ids: Sequence[int]
    pieces: Sequence[str]


class _OpenAiAnswer(Answer):
    _prefix: ClassVar[str]  # Of the answer's id.
    _kind: ClassVar[str]
    _chunk_kind: ClassVar[str]

    def __init__(self, answer_id: str, params: GenerationParams, logprobs: Logprobs | None) -> None:
        answer_id = self._prefix + answer_id
        self._head: Body = {"id": answer_id, "created": int(time.time()), "model": params.model}
        self._params = params
        self._told_logprobs = logprobs

    def whole(self, choices: Sequence[Choice]) -> Body:
        told = [self._choice(one, self._content(one.plan)) for one in choices]
        used = usage_of(choices)
        return {**self._head, "object": self._kind, "choices": told, "usage": used}

    def piece(self, choice: Choice, step: Step) -> bytes:
        """Chunks of a step; marks that clients do not see have no chunk."""
        contents = [self._delta(choice.plan, delta) for delta in step.deltas]
        has_more = self._params.has_token_ids or self._told_logprobs is not None
        if not contents and (step.is_last or has_more):
            contents = [self._delta(choice.plan, None)]
        chunks = [self._chunk(choice.index, content) for content in contents]
        if not chunks:
            return b""
        last = chunks[-1]["choices"][0]
        last |= self._beside(choice.plan, step.start, step.end, step.chars)
        if step.is_last:
            last |= _ending(choice.plan)
        return b"".join(map(event, chunks))

    def closing(self, choices: Sequence[Choice]) -> bytes:
        if not self._params.has_usage_chunk:
            return DONE
        head = {**self._head, "object": self._chunk_kind}
        return event({**head, "choices": [], "usage": usage_of(choices)}) + DONE

    def _choice(self, choice: Choice, content: Body) -> Body:
        plan = choice.plan
        beside = self._beside(plan, 0, len(plan.token_ids), 0)
        head = {"index": choice.index, "logprobs": None}
        return {**head, **content, **beside, **_ending(plan)}

    def _chunk(self, index: int, content: Body) -> Body:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": None}
        return {**self._head, "object": self._chunk_kind, "choices": [choice]}

    def _beside(self, plan: Plan, start: int, end: int, chars: int) -> Body:
        beside: Body = {}
        if self._params.has_token_ids:
            beside["token_ids"] = plan.token_ids[start:end]
        if self._told_logprobs is not None:
            token_ids, pieces = plan.token_ids[start:end], plan.pieces[start:end]
            beside["logprobs"] = self._logprobs(self._told_logprobs, token_ids, pieces, chars)
        return beside

    @abstractmethod
    def _content(self, plan: Plan) -> Body: ...

    @abstractmethod
    def _delta(self, plan: Plan, delta: Delta | None) -> Body: ...

    @abstractmethod
    def _logprobs(
        self, logprobs: Logprobs, token_ids: Sequence[int], pieces: Sequence[str], chars: int
    ) -> Body: ...


class ChatAnswer(_OpenAiAnswer):
    """A chat."""

    _prefix = "chatcmpl-"
    _kind = "chat.completion"
    _chunk_kind = "chat.completion.chunk"

    def opening(self, choices: Sequence[Choice]) -> bytes:
        role = {"delta": {"role": "assistant", "content": ""}}
        chunks = [self._chunk(choice.index, role) for choice in choices]
        return b"".join(event({**chunk, **self._prompt_ids()}) for chunk in chunks)

    def whole(self, choices: Sequence[Choice]) -> Body:
        return {**super().whole(choices), **self._prompt_ids()}

    def _prompt_ids(self) -> Body:
        """The tokens of the prompt, as vLLM tells them."""
        return {"prompt_token_ids": self._params.prompt_ids} if self._params.has_token_ids else {}

    def _content(self, plan: Plan) -> Body:
        return {"message": assistant_message(plan)}

    def _delta(self, plan: Plan, delta: Delta | None) -> Body:
        if delta is None:
            return {"delta": {}}
        if delta.call is None:
            return {"delta": {"content": delta.text}}
        told: Body = {"index": delta.call, "function": {"arguments": delta.text}}
        if delta.is_first:
            call = plan.calls[delta.call]
            told |= function_call(call.call_id, call.name, delta.text)
        return {"delta": {"tool_calls": [told]}}

    def _logprobs(
        self, logprobs: Logprobs, token_ids: Sequence[int], pieces: Sequence[str], chars: int
    ) -> Body:
        return {"content": logprobs.chat(token_ids, pieces)}


class CompletionAnswer(_OpenAiAnswer):
    """A completion."""

    _prefix = "cmpl-"
    _kind = _chunk_kind = "text_completion"

    def __init__(
        self,
        answer_id: str,
        params: GenerationParams,
        logprobs: Logprobs | None,
        *,
        echo: Echo | None = None,
    ) -> None:
        super().__init__(answer_id, params, logprobs)
        self._echo = echo
        self._prompt = "" if echo is None else "".join(echo.pieces)

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """The prompt, if it is echoed."""
        if self._echo is None:
            return b""
        chunks = []
        for choice in choices:
            chunk = self._chunk(choice.index, {"text": self._prompt})
            if self._told_logprobs is not None:
                chunk["choices"][0]["logprobs"] = self._echoed(self._told_logprobs)
            chunks.append(event(chunk))
        return b"".join(chunks)

    def _choice(self, choice: Choice, content: Body) -> Body:
        told = super()._choice(choice, content)
        if self._echo is not None and self._told_logprobs is not None:
            prompt, answer = self._echoed(self._told_logprobs), told["logprobs"]
            told["logprobs"] = {
                key: None if answer[key] is None else prompt[key] + answer[key] for key in answer
            }
        return told

    def _content(self, plan: Plan) -> Body:
        return {"text": self._prompt + plan.text}

    def _delta(self, plan: Plan, delta: Delta | None) -> Body:
        return {"text": "" if delta is None else delta.text}

    def _logprobs(
        self, logprobs: Logprobs, token_ids: Sequence[int], pieces: Sequence[str], chars: int
    ) -> Body:
        return logprobs.completion(token_ids, pieces, offset=len(self._prompt) + chars)

    def _echoed(self, logprobs: Logprobs) -> Body:
        assert self._echo is not None, "asked for where there is a prompt to tell"
        return logprobs.completion(
            self._echo.token_ids, self._echo.pieces, offset=0, is_prompt=True
        )


def assistant_message(plan: Plan) -> Body:
    """The answer as a message, in the form in which the chat's next turn repeats it."""
    calls = plan.told_calls
    if not calls:
        return {"role": "assistant", "content": plan.text}
    told = [function_call(call.call_id, call.name, call.arguments) for call in calls]
    return {"role": "assistant", "content": plan.text or None, "tool_calls": told}


def _ending(plan: Plan) -> Body:
    return {"finish_reason": plan.finish_reason, "stop_reason": plan.stop_reason}
