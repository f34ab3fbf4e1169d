"""kvflash.Tokenizer: exact to Python's own libraries, and clear about what it cannot do."""

from __future__ import annotations

import gc
import json
import threading
from array import array
from pathlib import Path

import numpy as np
import pytest

from kvflash import ConfigError, InvalidArgumentError, KvflashError, Tokenizer
from service import VECTORS

TINY = VECTORS / "tiny-llama"
GOLDEN = json.loads((VECTORS / "text" / "golden.json").read_text())
# Fields that the Python class supports; the others exist only in requests.
TAKEN = {"messages", "tools", "add_generation_prompt"}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY)


@pytest.fixture(scope="module")
def templated(tmp_path_factory):
    """The tiny model under each of the golden templates."""

    def make(name):
        folder = tmp_path_factory.mktemp(name)
        for file in TINY.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((TINY / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(config | GOLDEN["special_tokens"]))
        (folder / "chat_template.jinja").write_text(GOLDEN["templates"][name]["source"])
        return Tokenizer(folder)

    return {name: make(name) for name in GOLDEN["templates"]}


def test_chats_are_rendered_and_tokenized_as_python_does(templated):
    texts = errors = 0
    for case in GOLDEN["cases"]:
        chat = GOLDEN["conversations"][case["chat"]]
        if set(chat) - TAKEN:
            continue
        messages = json.dumps(chat["messages"], ensure_ascii=False)
        settings = {"add_generation_prompt": chat.get("add_generation_prompt", True)}
        if "tools" in chat:
            settings["tools_json"] = json.dumps(chat["tools"], ensure_ascii=False)
        model, name = templated[case["template"]], f"{case['template']}/{case['chat']}"
        if "error" in case:
            with pytest.raises(InvalidArgumentError):
                model.render_chat(messages, **settings)
            errors += 1
        else:
            assert model.render_chat(messages, **settings) == case["text"], name
            assert model.chat_tokens(messages, **settings) == case["ids"], name
            texts += 1
    assert texts >= 100
    assert errors >= 3


def test_golden_ids_are_those_of_the_text(tokenizer):
    seen = 0
    for case in GOLDEN["cases"]:
        if "ids" in case:
            assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
            seen += 1
    assert seen >= 120


def test_decoding_undoes_encoding(tokenizer):
    for text in ("hello world", " leading", "a\n\n\tb", "Wie geht's? 你好 😀", "", "x" * 5000):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        for form in (tuple(ids), array("I", ids), np.array(ids, dtype=np.int64)):
            assert tokenizer.decode(form) == text


def test_special_tokens_are_skipped_on_request(tokenizer):
    ids = tokenizer.encode("<s>hello", add_special_tokens=False)
    assert ids[0] == 0
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hello"


def test_content_that_is_no_text_has_no_prompt(tokenizer):
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    assert tokenizer.render_chat(json.dumps(image)) is None
    assert tokenizer.chat_tokens(json.dumps(image)) is None


@pytest.mark.parametrize("messages", ["", "nonsense", "5", "{}", '[{"role": 1}]', '["hi"]'])
def test_messages_that_are_none_are_refused(tokenizer, messages):
    with pytest.raises(InvalidArgumentError):
        tokenizer.render_chat(messages)
    with pytest.raises(InvalidArgumentError):
        tokenizer.chat_tokens(messages)


def test_tools_that_are_none_are_refused(tokenizer):
    with pytest.raises(InvalidArgumentError, match="tools"):
        tokenizer.render_chat("[]", tools_json="nonsense")


@pytest.mark.parametrize("ids", [[2**32], [-1], ["a"], None, [1.0]])
def test_ids_that_are_none_are_refused(tokenizer, ids):
    with pytest.raises(InvalidArgumentError, match="ids"):
        tokenizer.decode(ids)


def test_ids_outside_the_vocabulary_do_not_crash(tokenizer):
    try:
        assert isinstance(tokenizer.decode([2**32 - 1, 100_000]), str)
    except KvflashError as error:
        assert str(error)


@pytest.mark.parametrize("wrong", ["missing", "empty", "broken"])
def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path, wrong):
    folder = tmp_path / wrong
    if wrong != "missing":
        folder.mkdir()
    if wrong == "broken":
        (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        Tokenizer(folder)
    assert str(folder) in str(caught.value)


def test_a_folder_may_be_text_or_path():
    assert Tokenizer(str(TINY)).encode("hi") == Tokenizer(Path(TINY)).encode("hi")


def test_the_cache_changes_no_answer():
    cached, plain, small = (
        Tokenizer(TINY),
        Tokenizer(TINY, cache_bytes=0),
        Tokenizer(TINY, cache_bytes=4096),
    )
    text = ""
    for turn in range(60):
        text += f"turn {turn}: the quick brown fox's 你好 jumps\n"
        wanted = plain.encode(text)
        assert cached.encode(text) == wanted
        assert small.encode(text) == wanted
        assert cached.encode(text) == wanted
    assert len(wanted) > 500
    gc.collect()


def test_many_threads_share_one(tokenizer):
    texts = {at: f"{at} " + "the quick brown fox " * (at + 1) for at in range(8)}
    alone = {at: tokenizer.encode(text) for at, text in texts.items()}
    wrong = []

    def work(at):
        for _ in range(100):
            if tokenizer.encode(texts[at]) != alone[at]:
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(at,)) for at in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
