r"""Text to token ids and back, chat templates, and the words the mocker answers with.

Without a tokenizer folder a token is a UTF-8 byte, and a chat is rendered as
``<|role|>\ncontent\n`` for every message, with ``<|tools|>\n`` and a line for each tool before
them, and ``<|assistant|>\n`` after them when an answer is asked for. Answers are pseudo-random
words whose text encodes to the very tokens that were generated, so that the next turn of a
conversation finds them in the cache.
"""

from __future__ import annotations

import importlib
import json
import logging
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from kvflash.errors import ConfigError, InvalidArgumentError

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]

# Frequent English words, most of which are a single token in any large vocabulary, and those of a
# pangram, which small test vocabularies are often trained on.
_PROSE = (
    "the of and to in is was for that it with as on be at by he had not are but from or have an "
    "they which one you were all her she there would their we him been has when who will no more "
    "if out so up said what its about than into them can only other time new some could these two "
    "may first then do any like my now over such our man me even most made after also well "
    "quick brown fox jumps lazy dog hello world"
)
WORD_LENGTHS = (2, 8)
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_SAMPLE_TOKENS = 64
CALL_START, CALL_END = "<tool_call>\n", "\n</tool_call>"


class Tokenizer(Protocol):
    """What the API needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to token ids."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids to text.

        Raises:
            ValueError: An id is not in the vocabulary.
        """
        ...

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Message] | None = None,
    ) -> str:
        """Messages, and the tools that may be called, to the text of a prompt.

        Raises:
            ValueError: The template refuses the messages.
        """
        ...

    def plan_output(self, seed: int, count: int) -> list[int]:
        """The tokens of an answer: a function of the arguments only."""
        ...

    def piece(self, token_id: int) -> str:
        """The text that a token of `plan_output` adds to the answer."""
        ...


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[str]:
    """The share that each token has in the text that the tokens encode."""
    try:
        found = [tokenizer.decode([token_id]) for token_id in token_ids]
    except ValueError:
        found = []
    if "".join(found) == text:
        return found
    # Tokens that are parts of a character, or that stand for another text where they stand alone.
    count = len(token_ids)
    ends = [number * len(text) // max(count, 1) for number in range(count + 1)]
    return [text[start:end] for start, end in pairwise(ends)]


def call_text(name: str, arguments: str) -> str:
    """A call of a tool as Hermes models write it: what a model generates and a prompt repeats."""
    head = json.dumps({"name": name})[:-1]
    return f'{CALL_START}{head}, "arguments": {arguments}}}{CALL_END}'


class ByteTokenizer:
    """A token is a byte of UTF-8; ids are 0..255."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """UTF-8 bytes, whatever `add_special_tokens` says."""
        del add_special_tokens  # Bytes have none.
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the bytes; broken UTF-8 becomes U+FFFD.

        Raises:
            ValueError: An id is above 255.
        """
        return bytes(token_ids).decode("utf-8", errors="replace")

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Message] | None = None,
    ) -> str:
        r"""Render ``<|role|>\ncontent\n`` per message; parts of a content are concatenated."""
        turns = [f"<|{m['role']}|>\n{_content_text(m)}\n" for m in messages]
        if tools:
            turns.insert(0, "<|tools|>\n" + "".join(json.dumps(tool) + "\n" for tool in tools))
        if add_generation_prompt:
            turns.append("<|assistant|>\n")
        return "".join(turns)

    def plan_output(self, seed: int, count: int) -> list[int]:
        """Lower-case words with single spaces between, none at either end."""
        rng = random.Random(seed)
        token_ids = rng.choices(_LETTERS, k=count)
        space = rng.randint(*WORD_LENGTHS)
        while space < count - 1:
            token_ids[space] = ord(" ")
            space += 1 + rng.randint(*WORD_LENGTHS)
        return token_ids

    def piece(self, token_id: int) -> str:
        """The ASCII character."""
        return chr(token_id)


class FolderTokenizer:
    """The tokenizer of a Hugging Face model folder, by the Rust core."""

    def __init__(self, folder: str) -> None:
        """Load the folder and pick the tokens to answer with.

        Args:
            folder: Folder with tokenizer.json and, for chats, a chat template.

        Raises:
            ConfigError: The folder is no tokenizer, or no word survives encoding.
        """
        if not Path(folder, "tokenizer.json").is_file():
            raise ConfigError(f"--tokenizer must be a folder with a tokenizer.json, got {folder!r}")
        # Imported when needed: bytes need no extension module.
        self._core: Any = importlib.import_module("kvflash._core").Tokenizer(folder)
        words = _PROSE.split()
        first = self._single_tokens(words)
        rest = self._single_tokens([" " + word for word in words])
        if not rest:
            # A vocabulary without " word" tokens: words run together, which is as deterministic.
            rest = first
        if not rest:
            raise ConfigError(f"--tokenizer {folder} encodes no common English word as one token")
        self._pieces = {**first, **rest}
        self._first = list(first or rest)
        self._rest = list(rest)
        sample = self.plan_output(0, _SAMPLE_TOKENS)
        text = "".join(map(self.piece, sample))
        if self.encode(text, add_special_tokens=False) != sample:
            logger.warning(
                "text generated with tokenizer %s does not encode to the same tokens: "
                "the answers of a conversation will not be found in the cache",
                folder,
            )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to token ids."""
        return list(self._core.encode(text, add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids to text."""
        return str(self._core.decode(list(token_ids)))

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Message] | None = None,
    ) -> str:
        """Render the chat template of the folder.

        Raises:
            ValueError: The template refuses the messages, or a content is not text.
        """
        told = json.dumps(tools) if tools else None
        text = self._core.render_chat(json.dumps(messages), add_generation_prompt, tools_json=told)
        if text is None:
            raise InvalidArgumentError("a content is not text")
        return str(text)

    def plan_output(self, seed: int, count: int) -> list[int]:
        """Whole words, each one token; the first without a leading space, templates trim it."""
        rng = random.Random(seed)
        return [rng.choice(self._first), *rng.choices(self._rest, k=count - 1)]

    def piece(self, token_id: int) -> str:
        """The word of the token."""
        return self._pieces[token_id]

    def _single_tokens(self, words: Sequence[str]) -> dict[int, str]:
        tokens = {}
        for word in words:
            token_ids = self.encode(word, add_special_tokens=False)
            if len(token_ids) == 1:
                tokens[token_ids[0]] = word
        return tokens


def load(folder: str | None) -> Tokenizer:
    """The tokenizer of a folder, or bytes for None.

    Raises:
        ConfigError: The folder is not usable.
    """
    return ByteTokenizer() if folder is None else FolderTokenizer(folder)


def _content_text(message: Message) -> str:
    """The content of a message, and the calls that it made."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [str(part.get("text", "")) for part in content if isinstance(part, dict)]
        content = "".join(parts)
    texts = [content] if isinstance(content, str) and content else []
    for call in message.get("tool_calls") or ():
        told = call["function"]
        texts.append(call_text(str(told["name"]), str(told["arguments"])))
    return "\n".join(texts)
