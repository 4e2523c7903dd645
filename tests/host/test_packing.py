"""Prompt chunks in calls of few shapes: every token once, in order, and within what a call takes."""

import random

import numpy as np
import pytest

from jaxspec.host.packing import packed, parts_of, shapes_of


@pytest.mark.parametrize("group", [0, 4, 64])
def test_every_token_is_in_one_row_of_one_call(group: int) -> None:
    rng = random.Random(group)
    shapes = shapes_of(128, 16)
    for _ in range(200):
        chunks, left = [], 128
        while left and len(chunks) < 8:
            size = min(rng.choice([1, 15, 16, 17, 40, 128]), left)
            chunks.append((len(chunks), rng.randrange(200), [rng.randrange(1, 9) for _ in range(size)]))
            left -= size
        parts = [part for chunk in chunks for part in parts_of(*chunk, 16, group)]
        assert all(0 < len(ids) <= 16 for _, _, ids in parts)
        assert not group or all(start // group == (start + len(ids) - 1) // group for _, start, ids in parts)
        found = {row: {} for row, _, _ in chunks}
        for table, tokens in packed(parts, shapes):
            assert (len(tokens), table.shape[1]) in shapes
            assert table[2].sum() <= len(tokens)
            ends = np.cumsum(table[2])
            for row, start, count, end in zip(*table, ends, strict=True):
                for place in range(count):
                    assert found[row].setdefault(start + place, tokens[end - count + place]) > 0
            assert not tokens[ends[-1] :].any()
        assert found == {row: dict(enumerate(ids, start)) for row, start, ids in chunks}


def test_the_smallest_call_that_takes_all_is_made() -> None:
    shapes = shapes_of(128, 16)
    assert shapes == [(16, 4), (128, 8)]
    one, many = [(0, 0, [1] * 16)], [(row, 0, [1] * 5) for row in range(4)]
    assert [len(tokens) for _, tokens in packed(one, shapes)] == [16]
    assert [len(tokens) for _, tokens in packed(many, shapes)] == [128]
    assert [len(tokens) for _, tokens in packed(many * 3, shapes)] == [128, 128]
    assert not list(packed([], shapes))
