"""Log probabilities, derived from the tokens: in the form of chats, and in that of completions."""

from collections.abc import Sequence
from itertools import accumulate

from kvflash.mocker.fields import Body
from kvflash.mocker.protocol import GenerationParams
from kvflash.mocker.tokenizer import Tokenizer

# The generated token is always the likeliest; others follow at this distance.
STEP = 0.5


class Logprobs:
    """The log probabilities of an answer's tokens, each with ``count`` likely ones."""

    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        self._tokenizer = tokenizer
        self._count = count

    def chat(self, token_ids: Sequence[int], pieces: Sequence[str]) -> list[Body]:
        """In the form of chats and responses: an entry for each token."""
        entries = []
        for token_id, piece in zip(token_ids, pieces, strict=True):
            likely = [_entry(text, chance) for text, chance in self._likely(token_id, piece)]
            entries.append({**_entry(piece, _chance(token_id)), "top_logprobs": likely})
        return entries

    def completion(
        self,
        token_ids: Sequence[int],
        pieces: Sequence[str],
        *,
        offset: int,
        is_prompt: bool = False,
    ) -> Body:
        """In the form of completions: lists, with offsets in the text from ``offset`` on."""
        chances: list[float | None] = [_chance(token_id) for token_id in token_ids]
        tops: list[dict[str, float] | None] | None = None
        if self._count:
            pairs = zip(token_ids, pieces, strict=True)
            tops = [dict(self._likely(token_id, piece)) for token_id, piece in pairs]
        if is_prompt and chances:
            chances[0] = None
            if tops:
                tops[0] = None
        *places, _ = accumulate(map(len, pieces), initial=offset)
        return {
            "tokens": list(pieces),
            "token_logprobs": chances,
            "top_logprobs": tops,
            "text_offset": places,
        }

    def _likely(self, token_id: int, piece: str) -> list[tuple[str, float]]:
        """The token itself, then alternatives."""
        if self._count == 0:
            return []
        others = self._tokenizer.plan_output(token_id, 4 * self._count)
        texts = dict.fromkeys([piece, *map(self._tokenizer.piece, others)])
        chance = _chance(token_id)
        return [(text, chance - STEP * at) for at, text in enumerate(texts)][: self._count]


def _chance(token_id: int) -> float:
    return -(1 + token_id % 8) / 16


def _entry(text: str, chance: float) -> Body:
    return {"token": text, "logprob": chance, "bytes": list(text.encode(errors="replace"))}


def logprobs_of(params: GenerationParams, tokenizer: Tokenizer) -> Logprobs | None:
    """What a request wants of log probabilities, or None."""
    count = params.options.logprobs
    return None if count is None else Logprobs(tokenizer, count)
