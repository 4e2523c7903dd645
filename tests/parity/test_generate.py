"""Greedy answers of SmolLM2 against transformers' own generate, token by token."""

import logging
from typing import Any

import pytest

from jaxspec.config import SamplingParams
from jaxspec.llm import LLM

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.model]

TOKENS = 128
NEAR_TIE = 2e-3
"""Two logits this close may change places between two correct float32 programs."""


def answer(reference: Any, prompt: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    """What transformers generates greedily, the end of sequence included."""
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=list(eos_ids),
        pad_token_id=eos_ids[0],
    )
    return out[0, len(prompt) :].tolist()


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Index of the first token that is not the same; None when the answers are equal."""
    if ours == theirs:
        return None
    shorter = min(len(ours), len(theirs))
    return next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)


def near_tie_gap(reference: Any, prefix: list[int], tokens: set[int]) -> float:
    """Distance of transformers' two best logits after a prefix, which must be those of `tokens`; else infinity."""
    with torch.inference_mode():
        best = reference(torch.tensor([prefix]), logits_to_keep=1).logits[0, -1].topk(2)
    return float(best.values[0] - best.values[1]) if set(best.indices.tolist()) == tokens else float("inf")


def check(smollm2: LLM, reference: Any, questions: list[str]) -> None:
    """The answers to all questions are transformers', or leave them at a near-tie."""
    conversations = [[{"role": "user", "content": question}] for question in questions]
    answers = smollm2.chat(conversations, SamplingParams(max_tokens=TOKENS), progress=False)
    differences = []
    for number, ours in enumerate(answers):
        prompt, got = ours.prompt_token_ids, ours.token_ids
        expected = answer(reference, prompt, smollm2.tokenizer.eos_ids)
        place = first_difference(got, expected)
        if place is not None:
            assert place < min(len(got), len(expected)), f"question {number}: one answer ends after {place} tokens"
            gap = near_tie_gap(reference, prompt + got[:place], {got[place], expected[place]})
            differences.append((number, place, gap))
    logging.getLogger(__name__).info("%d answers, differences (question, token, gap): %s", len(answers), differences)
    assert all(gap <= NEAR_TIE for _, _, gap in differences), f"(question, token, gap): {differences}"


def test_greedy_answers_equal_those_of_transformers(smollm2: LLM, reference: Any, questions: list[str]) -> None:
    check(smollm2, reference, questions[:: len(questions) // 3][:3])


@pytest.mark.slow
def test_greedy_answers_to_all_questions(smollm2: LLM, reference: Any, questions: list[str]) -> None:
    check(smollm2, reference, questions)


def test_a_wrong_answer_is_no_near_tie(smollm2: LLM, reference: Any) -> None:
    """The check itself can fail: another likely token is told from a near-tie."""
    prompt = smollm2.tokenizer.encode("The capital of France is")
    best = answer(reference, prompt, smollm2.tokenizer.eos_ids)[0]
    assert near_tie_gap(reference, prompt, {best, best + 1}) > NEAR_TIE
