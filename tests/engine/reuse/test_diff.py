from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cacheslide_agents.engine.reuse import diff
from cacheslide_agents.engine.reuse.diff import Run, common_prefix_tokens, matching_runs
from tests.reference.longest_chain import longest_chain_tokens


def tokens_of(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def random_tokens(count: int, seed: int, vocab: int = 49_152) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, count)


def covered(runs: list[Run]) -> int:
    return sum(length for _, _, length in runs)


def assert_runs(runs: list[Run], prompt: np.ndarray, donor: np.ndarray, min_tokens: int) -> None:
    at_least, to_at_least = 0, 0
    for at, to, length in runs:
        assert length >= min_tokens
        assert at >= at_least and to >= to_at_least
        np.testing.assert_array_equal(prompt[at : at + length], donor[to : to + length])
        at_least, to_at_least = at + length, to + length
    assert at_least <= len(prompt) and to_at_least <= len(donor)


def without_repeats(values: list[int], gram_tokens: int) -> np.ndarray:
    """Leaves out each token with which a window of `gram_tokens` would come a second time."""
    kept: list[int] = []
    seen: set[tuple[int, ...]] = set()
    for value in values:
        gram = tuple([*kept, value][-gram_tokens:])
        if gram not in seen:
            kept.append(value)
            seen.add(gram)
    return tokens_of(kept)


small = st.lists(st.integers(0, 3), max_size=24).map(tokens_of)


@given(small, small, st.integers(1, 5))
def test_runs_are_valid_and_cover_both_ends_when_text_repeats(
    prompt: np.ndarray, donor: np.ndarray, min_tokens: int
) -> None:
    runs = matching_runs(prompt, donor, min_tokens)
    assert_runs(runs, prompt, donor, min_tokens)
    best = longest_chain_tokens(prompt, donor, min_tokens)
    assert covered(runs) <= best
    prefix = common_prefix_tokens(prompt, donor)
    suffix = common_prefix_tokens(prompt[prefix:][::-1], donor[prefix:][::-1])
    assert covered(runs) >= sum(length for length in (prefix, suffix) if length >= min_tokens)


@given(
    st.lists(st.integers(0, 7), max_size=40),
    st.lists(st.integers(0, 7), max_size=40),
    st.integers(2, 4),
    st.integers(0, 3),
)
def test_coverage_is_the_optimum_when_no_window_repeats(
    first: list[int], second: list[int], gram_tokens: int, longer: int
) -> None:
    donor = without_repeats(first, gram_tokens)
    prompt = without_repeats([*second[:20], *first[5:15], *second[20:], *first[20:]], gram_tokens)
    runs = matching_runs(prompt, donor, gram_tokens + longer)
    assert_runs(runs, prompt, donor, gram_tokens + longer)
    assert covered(runs) == longest_chain_tokens(prompt, donor, gram_tokens + longer)


GREEDY_TRAP = np.array(
    [*range(10), 99, *range(9, 14), 98, *range(11, 19), *range(16, 21), 97, *range(21, 27), *range(25, 30)]
)
"""The chain that covers most at first leaves too little of its last run to be trimmed for the next."""


@st.composite
def overlapping_pieces(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """A text, its pieces glued together so that neighbours share tokens, and a length that makes that matter."""
    shared_tokens = draw(st.integers(1, 4))
    min_tokens = shared_tokens + draw(st.integers(0, 3))
    whole, pieces, stop, foreign = np.arange(30), [], 0, 1_000
    while stop < 28:
        start = max(0, stop - draw(st.integers(0, shared_tokens - 1)))
        stop = start + min_tokens + draw(st.integers(0, 3))
        pieces.append(whole[start:stop])
        if draw(st.booleans()):
            pieces.append(np.array([foreign]))
            foreign += 1
    glued = np.concatenate(pieces)
    return (whole, glued, min_tokens) if draw(st.booleans()) else (glued, whole, min_tokens)


@settings(max_examples=200, deadline=None)
@given(overlapping_pieces())
@example((np.arange(9), np.array([0, 1, 2, 3, 4, 5, 99, 5, 6, 7, 8]), 4))  # only the earlier run can be trimmed
@example((np.arange(30), GREEDY_TRAP, 5))
def test_coverage_is_the_optimum_when_runs_overlap(case: tuple[np.ndarray, np.ndarray, int]) -> None:
    prompt, donor, min_tokens = case
    runs = matching_runs(prompt, donor, min_tokens)
    assert_runs(runs, prompt, donor, min_tokens)
    assert covered(runs) == longest_chain_tokens(prompt, donor, min_tokens)


@given(st.lists(st.tuples(st.sampled_from(["keep", "drop", "insert", "replace"]), st.integers(1, 60)), max_size=20))
def test_every_long_kept_piece_is_found_when_a_prompt_is_edited(script: list[tuple[str, int]]) -> None:
    donor = np.arange(sum(length for _, length in script), dtype=np.int64)
    pieces, place, foreign = [donor[:0]], 0, 10_000
    for action, length in script:
        if action == "keep":
            pieces.append(donor[place : place + length])
        if action in ("insert", "replace"):
            pieces.append(np.arange(foreign, foreign + length, dtype=np.int64))
            foreign += length
        if action != "insert":
            place += length
    prompt = np.concatenate(pieces)
    runs = matching_runs(prompt, donor, 16)
    assert_runs(runs, prompt, donor, 16)
    assert covered(runs) == longest_run_tokens(prompt, 16)


def longest_run_tokens(prompt: np.ndarray, min_tokens: int) -> int:
    """Donor tokens (those below 10,000) in pieces that go on by one."""
    borders = np.flatnonzero(np.diff(prompt) != 1) + 1
    pieces = [piece for piece in np.split(prompt, borders) if len(piece) and piece[0] < 10_000]
    return sum(len(piece) for piece in pieces if len(piece) >= min_tokens)


@given(small, small)
def test_runs_are_valid_when_every_hash_collides(prompt: np.ndarray, donor: np.ndarray) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            diff, "_gram_hashes", lambda tokens, gram: np.zeros(max(0, len(tokens) - gram + 1), dtype=np.uint64)
        )
        assert_runs(matching_runs(prompt, donor, 2), prompt, donor, 2)


def test_hashes_agree_exactly_where_windows_do_when_lengths_are_no_power_of_two() -> None:
    tokens = random_tokens(400, seed=1, vocab=2)
    for gram_tokens in range(1, 17):
        windows = np.lib.stride_tricks.sliding_window_view(tokens, gram_tokens)
        _, expected = np.unique(windows, axis=0, return_inverse=True)
        hashes = diff._gram_hashes(tokens, gram_tokens)
        assert len(hashes) == len(windows)
        assert len(np.unique(np.column_stack([expected.reshape(-1), hashes]), axis=0)) == len(np.unique(hashes))
        assert len(np.unique(hashes)) == expected.max() + 1


def test_head_and_tail_are_found_when_the_middle_changed() -> None:
    donor, new = random_tokens(1_664, seed=2), random_tokens(193, seed=3)
    prompt = np.concatenate([donor[:256], new, donor[384:], random_tokens(32, seed=4)])
    assert matching_runs(prompt, donor, 16) == [(0, 0, 256), (449, 384, 1_280)]


def test_one_run_is_found_when_thousands_of_tokens_are_equal() -> None:
    runs = matching_runs(np.zeros(4_000, dtype=np.int64), np.zeros(4_100, dtype=np.int64), 16)
    assert covered(runs) == 4_000


def test_the_right_lines_are_found_when_lines_hardly_differ() -> None:
    lines = np.tile(random_tokens(40, seed=5), (300, 1))
    lines[:, 20] = random_tokens(300, seed=6)
    donor = lines.reshape(-1)
    prompt = np.concatenate([lines[:100], lines[110:]]).reshape(-1)
    assert covered(matching_runs(prompt, donor, 16)) == len(prompt)


@pytest.mark.parametrize("length", [0, 15])
def test_nothing_matches_when_a_side_is_shorter_than_a_run(length: int) -> None:
    tokens = random_tokens(100, seed=7)
    assert matching_runs(tokens[:length], tokens, 16) == []
    assert matching_runs(tokens, tokens[:length], 16) == []


@pytest.mark.parametrize("vocab", [1, 2, 49_152])
def test_time_stays_far_from_quadratic_when_sequences_are_long(vocab: int) -> None:
    donor, prompt = random_tokens(32_000, seed=8, vocab=vocab), random_tokens(32_000, seed=9, vocab=vocab)
    started = time.process_time()
    matching_runs(prompt, donor, 16)
    assert time.process_time() - started < 2.0  # about 0.06 s; every pair of places would be a thousand million
