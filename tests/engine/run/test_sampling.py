"""Sampling against plain numpy: what may be drawn, how often, and the same for the same seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheslide_agents.engine.config import SamplingParams
from cacheslide_agents.engine.errors import ModelError
from cacheslide_agents.engine.run.sampling import Sampler

CPU = torch.device("cpu")
VOCAB = 24


def _sampler(prompt: list[int] | None = None, **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), np.asarray(prompt or [0], dtype=np.int64), CPU)


def _logits(seed: int, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, vocab).astype(np.float32)


def _penalized(logits: np.ndarray, prompt: list[int], answer: list[int], params: SamplingParams) -> np.ndarray:
    result = logits.astype(np.float64)
    for token in range(len(logits)):
        if token in prompt or token in answer:
            value = result[token]
            result[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = answer.count(token)
        result[token] -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
    return result


def _probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution to draw from, one token at a time."""
    scaled = logits.astype(np.float64) / params.temperature
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if params.top_k:
        order = order[: params.top_k]
    weights = {token: np.exp(scaled[token] - scaled[order[0]]) for token in order}
    total = sum(weights.values())
    result = np.zeros(len(logits))
    reached = 0.0
    for token in order:
        if reached / total >= params.top_p:
            break
        result[token] = weights[token]
        reached += weights[token]
    return result / reached


def test_greedy_takes_the_lowest_id_when_logits_are_equal() -> None:
    logits = torch.zeros(1000)
    logits[[700, 30, 31]] = 5.0
    assert _sampler().sample(logits, []) == 30
    assert _sampler(temperature=1e-9, seed=1).sample(logits, []) == 30


@given(
    seed=st.integers(0, 1000),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    penalties=st.tuples(st.floats(0.5, 2.0), st.floats(-2, 2), st.floats(-2, 2)),
)
@settings(max_examples=60, deadline=None)
def test_penalties_follow_prompt_and_answer(
    seed: int, prompt: list[int], penalties: tuple[float, float, float]
) -> None:
    params = SamplingParams(
        repetition_penalty=penalties[0], presence_penalty=penalties[1], frequency_penalty=penalties[2]
    )
    sampler = Sampler(params, np.array(prompt), CPU)
    answer: list[int] = []
    for step in range(6):
        logits = _logits(seed + step)
        given_logits = torch.from_numpy(logits.copy())
        token = sampler.sample(given_logits, answer)
        expected = _penalized(logits, prompt, answer, params)
        assert expected[token] >= expected.max() - 1e-4
        assert torch.equal(given_logits, torch.from_numpy(logits))
        answer.append(token)


def test_penalties_count_everything_when_the_answer_comes_at_once() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0])
    assert _sampler(frequency_penalty=1.5).sample(logits, [0, 0, 1]) == 2
    assert _sampler(presence_penalty=1.5).sample(logits, [0, 0, 0]) == 1
    assert _sampler(prompt=[0, 1], repetition_penalty=4.0).sample(logits, []) == 2


@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.3, 3.0),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
)
@settings(max_examples=150, deadline=None)
def test_only_kept_tokens_are_drawn(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    logits = _logits(seed)
    allowed = _probabilities(logits, params)
    sampler = Sampler(params, np.array([0]), CPU)
    for _ in range(40):
        assert allowed[sampler.sample(torch.from_numpy(logits), [])] > 0


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"top_k": 8, "top_p": 0.6},
        {"temperature": 2.0},
        {"temperature": 0.5, "top_p": 0.95},
    ],
)
def test_frequencies_follow_the_distribution(filters: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 1.0, "seed": 3, **filters})
    logits = _logits(5) / 2
    sampler = Sampler(params, np.array([0]), CPU)
    draws = 3000
    counts = np.bincount([sampler.sample(torch.from_numpy(logits), []) for _ in range(draws)], minlength=VOCAB)
    expected = _probabilities(logits, params) * draws
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_top_p_keeps_the_same_tokens_when_the_vocabulary_is_large(spread: float) -> None:
    """A flat distribution needs the full sort, a peaked one ends with the first candidates."""
    logits = _logits(7, 6000) * spread
    params = SamplingParams(temperature=1.0, top_p=0.7, seed=1)
    scaled = torch.from_numpy(logits) - float(logits.max())
    values, ids = Sampler(params, np.array([0]), CPU)._candidates(scaled, len(logits))
    allowed = set(np.flatnonzero(_probabilities(logits, params)))
    drawn = set(ids[values > float("-inf")].tolist())
    assert len(allowed ^ drawn) <= 1 + len(allowed) // 1000  # float32 sums


@pytest.mark.parametrize("filters", [{}, {"top_k": 10}, {"top_p": 0.9}])
def test_seed_repeats_the_draws_whatever_others_do(filters: dict[str, Any]) -> None:
    def draw(seed: int | None, disturb: bool) -> list[int]:
        sampler = _sampler(temperature=1.5, seed=seed, **filters)
        other = _sampler(temperature=1.0)
        tokens: list[int] = []
        for step in range(20):
            if disturb:
                torch.rand(3)
                other.sample(torch.from_numpy(_logits(step)), [])
            tokens.append(sampler.sample(torch.from_numpy(_logits(step)), tokens))
        return tokens

    assert draw(11, disturb=False) == draw(11, disturb=True)
    assert draw(11, disturb=False) != draw(12, disturb=False)
    assert draw(None, disturb=False) != draw(None, disturb=False)


@pytest.mark.parametrize("filters", [{"top_k": 12}, {"top_p": 0.8}])
def test_filters_change_no_draw_that_they_allow(filters: dict[str, Any]) -> None:
    logits = _logits(2)
    params = SamplingParams(temperature=1.0, seed=5, **filters)
    allowed = _probabilities(logits, params) > 0
    free, filtered = _sampler(temperature=1.0, seed=5), Sampler(params, np.array([0]), CPU)
    pairs = [
        (free.sample(torch.from_numpy(logits), []), filtered.sample(torch.from_numpy(logits), [])) for _ in range(60)
    ]
    assert all(drawn == kept for drawn, kept in pairs if allowed[drawn])
    assert sum(allowed[drawn] for drawn, _ in pairs) > 30


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1])
def test_every_allowed_integer_is_a_seed(seed: int) -> None:
    sampler = _sampler(temperature=1.0, seed=seed)
    assert sampler.seed == seed
    assert 0 <= sampler.sample(torch.zeros(5), []) < 5


def test_drawn_seed_is_told_when_none_was_given() -> None:
    first = _sampler(temperature=1.0)
    again = _sampler(temperature=1.0, seed=first.seed)
    logits = torch.zeros(1000)
    assert [first.sample(logits, []) for _ in range(5)] == [again.sample(logits, []) for _ in range(5)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_logits_are_refused_when_they_are_not_finite(temperature: float, bad: float | None) -> None:
    logits = torch.zeros(10)
    if bad is None:
        logits[:] = float("-inf")
    else:
        logits[3] = bad
    with pytest.raises(ModelError, match="not a finite number"):
        _sampler(temperature=temperature, top_p=0.9).sample(logits, [])


def test_forbidden_tokens_are_never_drawn_when_the_rest_is_flat() -> None:
    logits = torch.zeros(100)
    logits[10:] = float("-inf")
    for filters in ({}, {"top_k": 50}, {"top_p": 0.999}):
        sampler = _sampler(temperature=5.0, seed=0, **filters)
        assert all(sampler.sample(logits, []) < 10 for _ in range(50))


def test_half_precision_logits_are_taken() -> None:
    assert _sampler(repetition_penalty=1.1).sample(torch.tensor([0.0, 2.0, 1.0], dtype=torch.bfloat16), []) == 1
