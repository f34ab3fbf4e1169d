"""OpenAI's chats and completions: their bodies, and the chunks of their streams."""

import time
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from kvflash.mocker.answer import Answer, Logprobs, event, logprobs_of, usage_of
from kvflash.mocker.fields import Body
from kvflash.mocker.plan import Choice, Delta, Plan, Step
from kvflash.mocker.protocol import GenerationParams, decode, function_call
from kvflash.mocker.tokenizer import Tokenizer, pieces


class _OpenAiAnswer(Answer):
    _prefix: ClassVar[str]  # Of the answer's id.
    _kind: ClassVar[str]
    _chunk_kind: ClassVar[str]

    def __init__(self, params: GenerationParams, tokenizer: Tokenizer) -> None:
        self._head = {
            "id": self._prefix + uuid.uuid4().hex,
            "object": self._chunk_kind,
            "created": int(time.time()),
            "model": params.model,
        }
        self._has_usage = params.has_usage_chunk
        self._params = params
        self._told_logprobs = logprobs_of(params, tokenizer)

    def whole(self, choices: Sequence[Choice]) -> Body:
        told, used = list(map(self._choice, choices)), usage_of(choices)
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
        chunks[-1]["choices"][0] |= self._beside(choice.plan, step)
        return b"".join(map(event, chunks))

    def _choice(self, choice: Choice) -> Body:
        plan = choice.plan
        head = {"index": choice.index, "logprobs": None}
        return {**head, **self._content(plan), **self._beside(plan, plan.whole)}

    def _chunk(self, index: int, content: Body) -> Body:
        choice = {"index": index, "logprobs": None, **content, "finish_reason": None}
        return {**self._head, "choices": [choice]}

    def _beside(self, plan: Plan, step: Step) -> Body:
        """The fields beside the content that a step adds."""
        beside: Body = {}
        if step.is_last:
            beside = {"finish_reason": plan.finish_reason, "stop_reason": plan.stop_reason}
        if self._params.has_token_ids:
            beside["token_ids"] = step.token_ids
        if self._told_logprobs is not None:
            beside["logprobs"] = self._logprobs(self._told_logprobs, step)
        return beside

    @abstractmethod
    def _content(self, plan: Plan) -> Body: ...

    @abstractmethod
    def _delta(self, plan: Plan, delta: Delta | None) -> Body: ...

    @abstractmethod
    def _logprobs(self, logprobs: Logprobs, step: Step) -> Body: ...


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

    def _logprobs(self, logprobs: Logprobs, step: Step) -> Body:
        return {"content": logprobs.chat(step.token_ids, step.pieces)}


class CompletionAnswer(_OpenAiAnswer):
    """A completion."""

    _prefix = "cmpl-"
    _kind = _chunk_kind = "text_completion"

    def __init__(self, body: Body, params: GenerationParams, tokenizer: Tokenizer) -> None:
        super().__init__(params, tokenizer)
        self._prompt = ""  # As far as it is echoed.
        self._prompt_pieces: Sequence[str] = ()
        if params.options.has_echo:
            prompt = body["prompt"][0] if isinstance(body["prompt"], list) else body["prompt"]
            if not isinstance(prompt, str):
                prompt = decode(params.prompt_ids, "prompt", tokenizer)
            self._prompt = prompt
            self._prompt_pieces = pieces(tokenizer, params.prompt_ids, prompt)

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """The prompt, if it is echoed."""
        if not self._prompt_pieces:
            return b""
        content = {"text": self._prompt, "logprobs": self._logprobs_from_start((), ())}
        return b"".join(event(self._chunk(choice.index, content)) for choice in choices)

    def _choice(self, choice: Choice) -> Body:
        told = super()._choice(choice)
        if self._prompt_pieces:
            plan = choice.plan
            told["logprobs"] = self._logprobs_from_start(plan.token_ids, plan.pieces)
        return told

    def _content(self, plan: Plan) -> Body:
        return {"text": self._prompt + plan.text}

    def _delta(self, plan: Plan, delta: Delta | None) -> Body:
        return {"text": "" if delta is None else delta.text}

    def _logprobs(self, logprobs: Logprobs, step: Step) -> Body:
        offset = len(self._prompt) + step.chars
        return logprobs.completion(step.token_ids, step.pieces, offset=offset)

    def _logprobs_from_start(self, token_ids: Sequence[int], pieces: Sequence[str]) -> Body | None:
        """The log probabilities of the echoed prompt, and of these tokens of the answer."""
        if self._told_logprobs is None:
            return None
        told = [*self._params.prompt_ids, *token_ids], [*self._prompt_pieces, *pieces]
        return self._told_logprobs.completion(*told, offset=0, is_prompt=True)


def assistant_message(plan: Plan) -> Body:
    """The answer as a message, in the form in which the chat's next turn repeats it."""
    calls = plan.told_calls
    if not calls:
        return {"role": "assistant", "content": plan.text}
    told = [function_call(call.call_id, call.name, call.arguments) for call in calls]
    return {"role": "assistant", "content": plan.text or None, "tool_calls": told}
