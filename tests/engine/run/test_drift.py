"""Drift: its figures against formulas written out in float64, and a whole prompt's against an independent pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from cacheslide_agents.engine import Engine
from cacheslide_agents.engine.errors import ConfigError, PromptError
from cacheslide_agents.engine.run.drift import cksim, kl_divergence, measure, top_margin
from tests.engine.turns import FEW, first_turn, second_turn, tiny_engine
from tests.reference.dense_pass import DensePass


def slow_cksim(reused: torch.Tensor, full: torch.Tensor) -> float:
    cosines: list[float] = []
    for ours, theirs in zip(reused.double().flatten(0, 1), full.double().flatten(0, 1), strict=True):
        cosines.append((ours @ theirs).item() / math.sqrt((ours @ ours).item()) / math.sqrt((theirs @ theirs).item()))
    return sum(cosines) / len(cosines)


def slow_kl(full: np.ndarray, reused: np.ndarray) -> float:
    expected, got = (logits.astype(np.float64) - logits.max() for logits in (full, reused))
    expected, got = (scores - math.log(sum(np.exp(scores))) for scores in (expected, got))
    return float(sum(np.exp(expected) * (expected - got)))


def test_figures_are_those_of_the_formulas_when_tensors_are_random() -> None:
    generator = torch.Generator().manual_seed(0)
    full = torch.randn((3, 7, 4, 16), generator=generator)
    reused = full + torch.tensor([0.0, 0.3, 2.0]).view(3, 1, 1, 1) * torch.randn(full.shape, generator=generator)
    logits = torch.randn((2, 50), generator=generator) * 3
    drift = measure(7, reused, full, logits[0], logits[1])
    assert drift.slid_tokens == 7 and not drift.agrees
    for layer_idx in range(3):
        keys, values = (
            slow_cksim(reused[layer_idx, :, part], full[layer_idx, :, part]) for part in (slice(2), slice(2, 4))
        )
        assert drift.key_cksim[layer_idx] == pytest.approx(keys, abs=1e-5)
        assert drift.value_cksim[layer_idx] == pytest.approx(values, abs=1e-5)
    assert drift.key_cksim[0] == pytest.approx(1.0) and drift.key_cksim[2] < drift.key_cksim[1] < 0.99
    assert drift.kl == pytest.approx(slow_kl(logits[1].numpy(), logits[0].numpy()), rel=1e-4)
    ordered = logits[1].sort(descending=True).values
    assert drift.margin == pytest.approx(float(ordered[0] - ordered[1]), rel=1e-5)


def test_drift_is_nothing_when_both_ways_are_the_same() -> None:
    logits, kv = torch.linspace(-3, 3, 20), torch.ones((2, 5, 2, 8))
    drift = measure(5, kv, kv, logits, logits)
    assert (drift.kl, drift.agrees) == (0.0, True)
    assert drift.key_cksim == pytest.approx((1.0, 1.0)) and drift.value_cksim == pytest.approx((1.0, 1.0))
    assert cksim(torch.empty((0, 1, 8)), torch.empty((0, 1, 8))) == 1.0
    assert kl_divergence(logits.expand(3, -1), logits).tolist() == [0.0] * 3
    assert top_margin(torch.zeros((2, 4))).tolist() == [0.0, 0.0]


def test_a_prompts_drift_is_that_of_independent_passes_and_nothing_is_stored() -> None:
    with tiny_engine(correction_share=0.05) as engine:
        engine.generate(first_turn(), FEW, session="s")
        before = engine.stats()
        drift = engine.drift(second_turn(), session="s")
        assert engine.stats() == before
        by_policy = {
            policy: engine.logits(second_turn(), [5], session="s", policy=policy)[0].numpy()
            for policy in ("recompute", "slide")
        }
        assert drift.kl == pytest.approx(slow_kl(by_policy["recompute"], by_policy["slide"]), rel=1e-3, abs=1e-7)
        receipt = engine.generate(second_turn(), FEW, session="s").receipt
        assert drift.slid_tokens == receipt.slid_tokens > 0
        kv = _cached_kv(engine)
        slid = [
            token
            for start, stop, kind in receipt.treatments
            for token in range(start, stop)
            if kind in ("slid", "corrected")
        ]
        decoder: Any = engine._runner._decoder
        dense = DensePass(decoder, np.array(second_turn().token_ids(engine.tokenizer)))
        for layer_idx, similarity in enumerate(drift.key_cksim):
            keys, expected = (stored[layer_idx, slid, : decoder.spec.num_kv_heads] for stored in (kv, dense.kv))
            assert similarity == pytest.approx(slow_cksim(keys, expected), abs=1e-4)
        assert drift.key_cksim[0] == pytest.approx(1.0, abs=1e-5) and min(drift.key_cksim) < 0.9999


def test_nothing_drifts_when_reuse_is_exact() -> None:
    with tiny_engine() as engine:
        engine.generate(first_turn(), FEW, session="s")
        for policy in ("recompute", "prefix"):
            drift = engine.drift(second_turn(), session="s", policy=policy)
            assert drift.slid_tokens == 0 and drift.kl < 1e-6 and drift.agrees


def test_error_when_an_argument_is_wrong() -> None:
    with tiny_engine() as engine:
        with pytest.raises(PromptError, match="Prompt"):
            engine.drift("text")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="magic"):
            engine.drift(first_turn(), policy="magic")  # type: ignore[arg-type]


def _cached_kv(engine: Engine) -> torch.Tensor:
    preparation: Any = engine._runner.preparation
    sequence = list(preparation.index._sequences.values())[-1]
    kv: torch.Tensor = preparation.pool.kv[:, torch.from_numpy(sequence.table.slots(np.arange(len(sequence))))]
    return kv
