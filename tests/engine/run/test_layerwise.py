"""Correction by deviation in whole engines against dense passes that follow the algorithms token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cacheslide_agents.engine import Engine, EngineConfig, Prompt, SamplingParams, Segment
from cacheslide_agents.engine.config import PaperSettings, PolicyName
from cacheslide_agents.engine.reuse.spans import Plan
from tests.reference.dense_correction import DenseCorrection, moved
from tests.reference.dense_reuse import DenseRun, in_isolation
from tests.tiny import tiny_model, tiny_tokenizer

SYSTEM = Segment.system("You are a helpful assistant with a memory of what the user told you.\n")
OLD = Segment.update("memory: the user lives in Paris and likes tea.\n")
NEW = Segment.update("memory: the user moved to a small house by the sea, likes coffee now, and has a dog.\n")
HISTORY = Segment.suffix("".join(f"user: question {n}?\nassistant: the answer is {n * 7}.\n" for n in range(6)))
NOTE, OTHER_NOTE = Segment.suffix("note: bread at 80.\n"), Segment.suffix("a note: buy 3 loaves at the market.\n")
LATER = Segment.suffix("".join(f"user: and what of day {n}?\nassistant: it rained on it.\n" for n in range(5)))
QUERY = Segment.suffix("user: what does the memory say?\nassistant:")
FIRST = Prompt([SYSTEM, OLD, HISTORY, NOTE, LATER])
SECOND = Prompt([SYSTEM, NEW, HISTORY, OTHER_NOTE, LATER, QUERY])
ANSWER = " the memory says"
ONE = SamplingParams(max_tokens=1)
FAMILIES = ("llama", "qwen3", "phi3", "mistral+220")
"""Within the window of layer 0 enough tokens see the change that chosen ones differ by more than rounding."""


class Watched:
    """An engine after its first turn, and what the dense passes need to know of it."""

    def __init__(self, family: str, policy: PolicyName, **settings: Any) -> None:
        name, _, window = family.partition("+")
        model = tiny_model(name, num_hidden_layers=10, **({"sliding_window": int(window)} if window else {}))
        config = EngineConfig(**{"pool_tokens": 8192, "dtype": "float32", **settings})
        self.policy = policy
        self.engine = Engine.from_model(model, tiny_tokenizer(None), config)
        runner: Any = self.engine._runner
        self.decoder = runner._decoder
        self.plan: Plan | None = None
        prefill = runner.preparation.prefill

        def noting(prepared: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            logits: torch.Tensor = prefill(prepared, *args, **kwargs)
            self.plan = prepared.plan
            return logits

        runner.preparation.prefill = noting
        self.engine.generate(FIRST, ONE, session="s", policy=policy)
        self.ids = np.array(SECOND.token_ids(self.engine.tokenizer))
        answer = self.engine.tokenizer.encode(ANSWER, add_special_tokens=False)
        self.continued = np.concatenate([self.ids, answer[:-1]])

    def check(self, **rule: Any) -> DenseCorrection:
        """K, V, logits, what was corrected and the work done equal the dense pass's."""
        receipt = self.engine.generate(SECOND, ONE, session="s", policy=self.policy, store=False).receipt
        kv = self.engine.trace(SECOND, session="s", policy=self.policy).keys_values
        dense = self.dense(self.ids, **rule)
        expected, _ = dense.run()
        assert self.plan is not None and self.plan.corrected.tolist() == sorted(dense.corrected)
        assert receipt.corrected_tokens == len(dense.corrected)
        assert receipt.computed_share == pytest.approx(dense.work / len(self.ids) / len(expected))
        for layer_idx, layer in enumerate(expected):
            torch.testing.assert_close(kv[layer_idx], layer, atol=5e-4, rtol=1e-3, msg=f"layer {layer_idx}")
        logits = self.engine.logits(SECOND, ANSWER, session="s", policy=self.policy)
        full = self.dense(self.continued, **rule).run()[1]
        torch.testing.assert_close(logits, full[len(self.ids) - 1 :], atol=2e-3, rtol=1e-3)
        return dense

    def dense(self, ids: np.ndarray, **rule: Any) -> DenseCorrection:
        """The dense pass, over K and V from a dense pass of the first turn or of its segments alone."""
        assert self.plan is not None
        exact, slid, source, target = set[int](), set[int](), list[int](), list[int]()
        for span in self.plan.spans:
            if span.source is not None and span.source_start is not None:
                (exact if span.treatment == "exact" else slid).update(range(span.start, span.stop))
                source += range(span.source_start, span.source_start + len(span))
                target += range(span.start, span.stop)
        if self.policy == "cacheblend":
            cached = in_isolation(self.decoder, ids, SECOND.encode(self.engine.tokenizer).segment_ranges())
        else:
            first = DenseRun(self.decoder, np.array(FIRST.token_ids(self.engine.tokenizer))).kv
            cached = moved(self.decoder, first, np.array(source), np.array(target), len(ids))
        return DenseCorrection(self.decoder, ids, cached, exact, slid, **rule)


@pytest.mark.parametrize(("family", "chunk_tokens"), [*((family, 2048) for family in FAMILIES), ("qwen3", 48)])
def test_deviation_equals_the_dense_pass_when_text_moves(family: str, chunk_tokens: int) -> None:
    watched = Watched(family, "deviation", deviation_share=0.3, prefill_chunk_tokens=chunk_tokens)
    with watched.engine:
        dense = watched.check(share=0.3)
        assert len(dense.slid) > 150 and len(dense.exact) > 16


@pytest.mark.parametrize("family", FAMILIES)
def test_cacheblend_equals_the_dense_pass_when_segments_move(family: str) -> None:
    watched = Watched(family, "cacheblend", cacheblend_share=0.18)
    with watched.engine:
        dense = watched.check(share=0.18)
        assert len(dense.slid) > 150 and len(dense.exact) > 16


@pytest.mark.parametrize(
    ("family", "settings", "rule"),
    [
        ("mistral+220", {}, {}),
        ("llama", {"gate": "off"}, {"tau": None}),
        ("qwen3", {"clamp_alpha": True, "gate_every_layers": 3}, {"alpha": 1.0, "every": 3}),
        (
            "phi3",
            {"gate": "printed", "tau": 0.9, "selection_layer": 3},
            {"converged": False, "tau": 0.9, "selection": 3},
        ),
        ("mistral+220", {"attends_to": "update", "share": 0.2}, {"updates": {}, "share": 0.2}),
    ],
)
def test_paper_equals_the_dense_pass_when_text_moves(
    family: str, settings: dict[str, Any], rule: dict[str, Any]
) -> None:
    watched = Watched(family, "paper", paper=PaperSettings(**{"share": 0.1, **settings}))
    with watched.engine:
        rule = {"share": 0.1, "alpha": float("inf"), "tau": 0.12, **rule}
        if "updates" in rule:
            start, stop = SECOND.encode(watched.engine.tokenizer).segment_ranges()[1]
            rule["updates"] = set(range(start, stop))
        watched.check(**rule)


@pytest.mark.parametrize("family", ["phi3", "mistral+220"])
@pytest.mark.parametrize("policy", ["deviation", "cacheblend"])
def test_logits_equal_recompute_when_everything_is_corrected(policy: PolicyName, family: str) -> None:
    watched = Watched(family, policy, deviation_share=1.0, cacheblend_share=1.0)
    with watched.engine as engine:
        full = engine.logits(SECOND, ANSWER, session="s", policy="recompute")
        torch.testing.assert_close(engine.logits(SECOND, ANSWER, session="s", policy=policy), full, atol=1e-4, rtol=0)
        receipt = engine.generate(SECOND, ONE, session="s", policy=policy).receipt
        assert receipt.corrected_tokens == receipt.slid_tokens > 150 and receipt.staleness == 0.0


@pytest.mark.parametrize("policy", ["deviation", "paper"])
def test_nothing_is_computed_again_when_nothing_changed(policy: PolicyName) -> None:
    watched = Watched("llama", policy)
    with watched.engine as engine:
        engine.generate(SECOND, ONE, session="s", policy=policy)
        for prompt in (SECOND, Prompt([*SECOND.segments, Segment.suffix(" yes. ")])):
            receipt = engine.generate(prompt, ONE, session="s", policy=policy, store=False).receipt
            assert receipt.corrected_tokens == 0
            assert receipt.computed_share == receipt.fresh_tokens / receipt.prompt_tokens < 0.1


def test_deviation_corrects_by_its_share_and_keeps_its_donor_as_it_was() -> None:
    for share in (0.0, 0.01, 0.5):
        watched = Watched("llama", "deviation", deviation_share=share)
        with watched.engine as engine:
            before = engine.trace(FIRST, session="s", policy="prefix").keys_values
            receipt = engine.generate(SECOND, ONE, session="s", policy="deviation").receipt
            assert receipt.corrected_tokens == int(np.ceil(share * receipt.slid_tokens))
            assert engine.trace(FIRST, session="s", policy="prefix").keys_values.equal(before)


def test_less_is_reused_when_the_pool_is_full() -> None:
    with Watched("llama", "deviation").engine as measuring:
        tokens = len(SECOND.token_ids(measuring.tokenizer)) + 16
    policies: tuple[PolicyName, ...] = ("deviation", "paper", "cacheblend")
    for policy in policies:
        watched = Watched("llama", policy, pool_tokens=tokens)
        with watched.engine as engine:
            receipt = engine.generate(SECOND, ONE, session="s", policy=policy, store=False).receipt
            assert receipt.fallback is not None and "pool_tokens" in receipt.fallback
            assert receipt.slid_tokens == receipt.corrected_tokens == 0 < receipt.fresh_tokens
            engine.forget("s")
            assert engine.stats().free_pages == engine.stats().pool_pages
