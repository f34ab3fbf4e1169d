"""Tokens and texts: answers that encode to themselves, with bytes and with a word vocabulary."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvflash.errors import ConfigError
from kvflash.mocker.tokenizer import ByteTokenizer, FolderTokenizer, load


def test_bytes_round_trip() -> None:
    tokenizer = load(None)
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("é!", add_special_tokens=True) == [0xC3, 0xA9, 0x21]
    assert tokenizer.decode([0xC3, 0xA9, 0x21]) == "é!"
    assert tokenizer.encode("\ud800", add_special_tokens=False) == [ord("?")]
    with pytest.raises(ValueError, match="range"):
        tokenizer.decode([256])


def test_byte_chat_template() -> None:
    tokenizer = ByteTokenizer()
    turns: list[dict[str, object]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
    ]
    text = tokenizer.render_chat(turns, add_generation_prompt=False)
    assert text == "<|system|>\nBe brief.\n<|user|>\nab\n<|assistant|>\n\n"
    asked = tokenizer.render_chat(turns[:2], add_generation_prompt=True)
    assert asked == "<|system|>\nBe brief.\n<|user|>\nab\n<|assistant|>\n"


@pytest.mark.parametrize("count", [1, 2, 3, 10, 100, 1000])
def test_byte_answers_are_words_that_encode_to_themselves(count: int) -> None:
    tokenizer = ByteTokenizer()
    for seed in range(20):
        token_ids = tokenizer.plan_output(seed, count)
        assert len(token_ids) == count
        assert token_ids == tokenizer.plan_output(seed, count)
        text = "".join(map(tokenizer.piece, token_ids))
        assert tokenizer.encode(text, add_special_tokens=False) == token_ids
        assert text == text.strip()
        assert "  " not in text
        assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ")
        if count >= 10:
            assert " " in text
    assert tokenizer.plan_output(1, 50) != tokenizer.plan_output(2, 50)


class WordCore:
    """Stands in for the Rust class: a token is a word with or without its leading space."""

    words = ("the", " the", "of", " of", "quick", " quick", "dog", " dog", " ", "x")

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = [99] if add_special_tokens else []
        while text:
            word = max((w for w in self.words if text.startswith(w)), key=len, default="")
            ids.append(self.words.index(word) if word else 98)
            text = text[len(word) or 1 :]
        return ids

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[one] for one in ids)

    def render_chat(
        self,
        messages_json: str,
        add_generation_prompt: bool = True,
        *,
        tools_json: str | None = None,
    ) -> str | None:
        contents = [message["content"] for message in json.loads(messages_json)]
        contents += [tool["function"]["name"] for tool in json.loads(tools_json or "[]")]
        if not all(isinstance(content, str) for content in contents):
            return None
        return "|".join(contents) + ("!" if add_generation_prompt else "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tokenizer folder, and a core that does not depend on what is in it."""
    (tmp_path / "tokenizer.json").write_text("{}")
    core = ModuleType("kvflash._core")
    core.Tokenizer = WordCore  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvflash._core", core)
    return str(tmp_path)


def test_folder_answers_encode_to_themselves(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load(folder)
    assert isinstance(tokenizer, FolderTokenizer)
    for seed, count in [(1, 1), (2, 2), (3, 64)]:
        token_ids = tokenizer.plan_output(seed, count)
        assert len(token_ids) == count
        text = "".join(map(tokenizer.piece, token_ids))
        assert tokenizer.encode(text, add_special_tokens=False) == token_ids
        assert tokenizer.decode(token_ids) == text
        assert not text.startswith(" "), "templates trim"
    assert tokenizer.encode("the", add_special_tokens=True)[0] == 99
    turns = [{"role": "user", "content": "a"}]
    assert tokenizer.render_chat(turns, add_generation_prompt=True) == "a!"
    assert tokenizer.render_chat(turns, add_generation_prompt=False) == "a"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tokenizer.render_chat(turns, add_generation_prompt=False, tools=tools) == "a|f"
    with pytest.raises(ValueError, match="not text"):
        tokenizer.render_chat([{"role": "user", "content": 5}], add_generation_prompt=True)
    assert not caplog.records


def test_folder_whose_answers_do_not_round_trip_warns(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Without spaced words they run together, and "ofthe" becomes another token.
    monkeypatch.setattr(WordCore, "words", ("the", "of", "ofthe", "theof", "thethe", "ofof"))
    with caplog.at_level(logging.WARNING):
        FolderTokenizer(folder)
    assert "does not encode to the same tokens" in caplog.text


def test_unusable_folders_are_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"or --model-path\) must be a folder with a tokenizer\.json"
    ):
        load(folder + "/missing")
    monkeypatch.setattr(WordCore, "words", ("x",))
    with pytest.raises(ConfigError, match="no common English word"):
        load(folder)
