"""The demo's workload is a function of its options."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from demo.workload import WorkloadOptions, fingerprint, generate

OPTIONS = WorkloadOptions(applications=5, conversations=23, turns=4, seed=7)


def test_the_same_seed_gives_the_same_characters() -> None:
    assert generate(OPTIONS) == generate(replace(OPTIONS))
    assert generate(OPTIONS) != generate(replace(OPTIONS, seed=8))


def test_lengths_are_within_their_ranges() -> None:
    workload = generate(OPTIONS)
    assert workload.request_count == 23 * 4
    for number, conversation in enumerate(workload.conversations):
        assert conversation.number == number
        assert 5_000 <= len(conversation.system) <= 8_000
        assert conversation.turns[0].think_ms == 0
        for turn in conversation.turns:
            assert 150 <= len(turn.question) <= 700
            assert 12 <= turn.answer_tokens <= 24
            # A byte is a token, and a template may trim the ends.
            assert turn.question.isascii()
            assert turn.question == turn.question.strip()


def test_applications_share_their_prompt_and_nothing_else() -> None:
    workload = generate(OPTIONS)
    systems = {one.application: one.system for one in workload.conversations}
    assert set(systems) == set(range(5))
    assert all(one.system == systems[one.application] for one in workload.conversations)
    assert len({system[:4] for system in systems.values()}) == 5
    assert workload.shared_chars == sum(map(len, systems.values()))
    shares = [sum(c.application == a for c in workload.conversations) for a in systems]
    assert max(shares) - min(shares) <= 1


def test_every_turn_continues_the_one_before() -> None:
    conversation = generate(OPTIONS).conversations[3]
    answers = ["first", "second", "third"]
    prompts = [conversation.messages(answers[:turn]) for turn in range(4)]
    assert [len(prompt) for prompt in prompts] == [2, 4, 6, 8]
    for (shorter, longer), answer in zip(pairwise(prompts), answers, strict=True):
        assert longer[: len(shorter)] == shorter
        assert longer[len(shorter)] == {"role": "assistant", "content": answer}
    assert prompts[-1][-1]["content"] == conversation.turns[-1].question


@pytest.mark.parametrize("length", [1, 2, 40])
def test_texts_may_be_as_short_as_asked(length: int) -> None:
    options = replace(OPTIONS, question_chars=(length, length), system_chars=(1, 1))
    for conversation in generate(options).conversations:
        assert {len(turn.question) for turn in conversation.turns} == {length}
        assert conversation.system


def test_fingerprints_tell_values_apart() -> None:
    assert fingerprint([{"a": 1, "b": 2}]) == fingerprint([{"b": 2, "a": 1}])
    assert fingerprint(["ab"]) != fingerprint(["a", "b"])
