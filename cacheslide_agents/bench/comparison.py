"""Measures policies against a full prefill on the same two turns.

The first turn, on an empty cache, is the same under all policies that keep KV in context: they share it. A policy that
keeps segments computed alone has a namespace of its own. The second turn is answered without being stored, so that any
number of variants and repetitions start from the same cache and none finds another's. Where the pool cannot keep the
first turn beside the second, nothing is measured: policies would differ by what was evicted before each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import mean, median
from typing import Any

import torch

from cacheslide_agents.engine import Engine, EngineConfig, Output, Receipt, SamplingParams
from cacheslide_agents.engine.config import PAGE_TOKENS, PER_REQUEST, DtypeName
from cacheslide_agents.engine.errors import ModelError, PromptError
from cacheslide_agents.engine.reuse.policies import policy_named
from cacheslide_agents.engine.run.drift import cksim_by_layer, kl_divergence, top_margin

from .answers import AnswerScores, compare_answers
from .turns import Turns
from .variants import Variant

CLEAR_MARGIN = 0.1
"""Nats by which the full prefill's first token is more likely than its second where agreement is counted."""

_FULL = "recompute"


def measuring_config(dtype: DtypeName, model: str | None = None) -> EngineConfig:
    """Settings of an engine that is measured: no repair and no gate, which would change what a policy does.

    Args:
        dtype: What the model computes in.
        model: A model folder, hub id or GGUF file; None is the bundled one.
    """
    return EngineConfig(model=model, dtype=dtype, repair=False, gate_share=0.0)


@dataclass(frozen=True)
class Measurement:
    """One variant on one pair of turns.

    Attributes:
        turns: Their id.
        variant: Its name.
        receipt: Of the second turn.
        ttft_seconds: Time to the second turn's first token, the median of the repetitions.
        kl: KL(full ‖ variant), nats, mean over the answer's tokens.
        agreeing_tokens: Of `clear_tokens`, those at which the variant's most likely token is the full prefill's.
        clear_tokens: Tokens of the answer at which the full prefill's first choice leads by `CLEAR_MARGIN`.
        leak: Change of the old value's log-probability, nats; None without an old value.
        key_cksim: CKSim of the slid tokens' keys, mean over layers; 1 if nothing slid, None in a brief comparison.
        value_cksim: The same of their values.
        answer: What the variant answers, greedily.
        to_gold: That answer against the gold one; None without one.
        to_full: That answer against the full prefill's.
    """

    turns: str
    variant: str
    receipt: Receipt
    ttft_seconds: float
    kl: float
    agreeing_tokens: int
    clear_tokens: int
    leak: float | None
    key_cksim: float | None
    value_cksim: float | None
    answer: str
    to_gold: AnswerScores | None
    to_full: AnswerScores

    @property
    def computed_share(self) -> float:
        """Share of the prompt's tokens that were computed."""
        return self.receipt.computed_tokens / self.receipt.prompt_tokens

    @property
    def corrected_share(self) -> float:
        """Share of the slid tokens that were corrected; 0 if nothing slid."""
        return self.receipt.corrected_tokens / max(1, self.receipt.slid_tokens)


@dataclass(frozen=True)
class _Scores:
    """Logits of the answer, log-probability of the old value, K and V; None where left out."""

    logits: torch.Tensor
    old_value: float | None
    kv: torch.Tensor | None


class Comparison:
    """Measures variants on one pair of turns after another.

    Args:
        engine: Its `config.PER_REQUEST` settings change while it measures and are as before afterwards.
        variants: With `recompute` among them, under the engine's settings.
        repeats: Timed repetitions of each second turn.
        answer_tokens: Longest answer; with a gold answer, as many tokens as that has.
        brief: Leave out CKSim, old values and answers longer than a token: divergence and times alone, for sweeps.
    """

    def __init__(
        self,
        engine: Engine,
        variants: Sequence[Variant],
        *,
        repeats: int = 1,
        answer_tokens: int = 24,
        brief: bool = False,
    ) -> None:
        assert repeats > 0 and any(variant.policy == _FULL for variant in variants)
        self._engine = engine
        self._variants = list(variants)
        self._repeats = repeats
        self._answer_tokens = answer_tokens
        self._brief = brief
        self._settings = {name: getattr(engine.config, name) for name in PER_REQUEST}
        self._measured = 0
        self._evicted_before = 0

    def warm_up(self, turns: Turns) -> None:
        """Takes both turns once under every policy, so that no first use is timed."""
        try:
            self._take_first(turns)
            for variant in self._variants:
                if variant.computes_like is None:
                    self._use(variant.settings)
                    self._answer(turns, variant, max_tokens=2)
        finally:
            self._clean_up()

    def measure(self, turns: Turns) -> list[Measurement]:
        """Every variant on these turns, in the order of the variants.

        Raises:
            PromptError: A prompt is malformed or does not fit the context, or the pool does not hold both; nothing
                stays cached.
            ModelError: The model gives logits that are not finite; nothing stays cached.
        """
        try:
            self._take_first(turns)
            outputs, seconds = self._time(turns)
            return self._compare(turns, outputs, seconds)
        finally:
            self._measured += 1
            self._clean_up()

    def _take_first(self, turns: Turns) -> None:
        self._use({})
        self._evicted_before = self._engine.stats().evicted_sequences
        policies = {_namespace(variant.policy): variant.policy for variant in reversed(self._variants)}
        for namespace, policy in policies.items():
            self._engine.generate(
                turns.first, SamplingParams(max_tokens=1), session=_SESSION, namespace=namespace, policy=policy
            )

    def _time(self, turns: Turns) -> tuple[dict[str, Output], dict[str, list[float]]]:
        """The answers, and the times to the first token, by variant; the order changes with turns and repetition."""
        outputs: dict[str, Output] = {}
        seconds: dict[str, list[float]] = {variant.name: [] for variant in self._variants}
        max_tokens = self._max_tokens(turns)
        for repeat in range(self._repeats):
            for variant in self._order(repeat):
                self._use(self._settings_of(variant, outputs))
                output = self._answer(turns, variant, max_tokens if repeat == 0 else 1)
                self._check_room(turns)
                outputs.setdefault(variant.name, output)
                seconds[variant.name].append(output.receipt.ttft_seconds)
        return outputs, seconds

    def _order(self, repeat: int) -> list[Variant]:
        """The variants, rotated and reversed by turns; those that compute like another come after all others."""
        first = (self._measured + repeat) % len(self._variants)
        rotated = self._variants[first:] + self._variants[:first]
        if (self._measured + repeat) % 2:
            rotated.reverse()
        return sorted(rotated, key=lambda variant: variant.computes_like is not None)

    def _compare(self, turns: Turns, outputs: dict[str, Output], seconds: dict[str, list[float]]) -> list[Measurement]:
        reference = next(variant for variant in self._variants if variant.policy == _FULL)
        full_output = outputs[reference.name]
        answer = turns.answer if turns.answer is not None else list(full_output.token_ids)
        self._use({})
        full = self._scores(turns, reference, answer)
        clear = top_margin(full.logits) > CLEAR_MARGIN
        measurements = []
        for variant in self._variants:
            if variant.policy == _FULL:
                scores = full
            else:
                self._use(self._settings_of(variant, outputs))
                scores = self._scores(turns, variant, answer)
            self._check_room(turns)
            output = outputs[variant.name]
            agreeing = (scores.logits.argmax(-1) == full.logits.argmax(-1)) & clear
            keys, values = _cksim(scores.kv, full.kv, output.receipt)
            kl = float(kl_divergence(full.logits, scores.logits).mean())
            leak = None if scores.old_value is None else scores.old_value - (full.old_value or 0.0)
            if not isfinite(kl) or not isfinite(leak or 0.0):
                raise ModelError(
                    f"the model gives logits for {variant.name} that are not finite numbers (divergence {kl}): the "
                    'weights are damaged, or overflow in their dtype unless that is "float32"'
                )
            measurements.append(
                Measurement(
                    turns=turns.id,
                    variant=variant.name,
                    receipt=output.receipt,
                    ttft_seconds=median(seconds[variant.name]),
                    kl=kl,
                    agreeing_tokens=int(agreeing.sum()),
                    clear_tokens=int(clear.sum()),
                    leak=leak,
                    key_cksim=keys,
                    value_cksim=values,
                    answer=output.text,
                    to_gold=None if turns.answer is None else compare_answers(output.text, turns.answer),
                    to_full=compare_answers(output.text, full_output.text),
                )
            )
        return measurements

    def _check_room(self, turns: Turns) -> None:
        """Makes sure that the first turn was not evicted for what was asked since.

        Raises:
            PromptError: Something was evicted.
        """
        stats = self._engine.stats()
        if stats.evicted_sequences > self._evicted_before:
            first, second = (self._engine.count_tokens(prompt.text) for prompt in (turns.first, turns.second))
            raise PromptError(
                f"the pool of {stats.pool_pages * PAGE_TOKENS} tokens does not hold the first turn of {first} tokens, "
                f"as each policy keeps it, beside the second of {second}: raise pool_tokens, shorten the turns or "
                "compare fewer policies"
            )

    def _scores(self, turns: Turns, variant: Variant, answer: str | list[int]) -> _Scores:
        where: dict[str, Any] = {
            "session": _SESSION,
            "namespace": _namespace(variant.policy),
            "policy": variant.policy,
        }
        if self._brief:
            return _Scores(self._engine.logits(turns.second, answer, **where), None, None)
        old = None
        if turns.old_value is not None:
            old = self._engine.tokenizer.encode(_continuing(turns, turns.old_value), add_special_tokens=False)
        trace = self._engine.trace(turns.second, answer, *([] if old is None else [old]), **where)
        old_value = None
        if old is not None:
            logits = trace.logits[1].log_softmax(-1)
            old_value = float(logits.gather(-1, torch.tensor(old, device=logits.device).unsqueeze(-1)).sum())
        return _Scores(trace.logits[0], old_value, trace.keys_values)

    def _answer(self, turns: Turns, variant: Variant, max_tokens: int) -> Output:
        return self._engine.generate(
            turns.second,
            SamplingParams(max_tokens=max_tokens),
            session=_SESSION,
            namespace=_namespace(variant.policy),
            policy=variant.policy,
            store=False,
        )

    def _max_tokens(self, turns: Turns) -> int:
        if turns.answer is None:
            return self._answer_tokens
        if self._brief:
            return 1
        return min(self._answer_tokens, max(1, self._engine.count_tokens(turns.answer)))

    def _settings_of(self, variant: Variant, outputs: dict[str, Output]) -> Mapping[str, Any]:
        """The variant's settings; with another's number of computed tokens, as near as whole tokens allow."""
        if variant.computes_like is None:
            return variant.settings
        # Not those without correction: under them runs slide that are else computed.
        alike = {
            other.name
            for other in self._variants
            if other.policy == variant.policy and other.settings.get("correction_share") != 0.0
        }
        own = next(output.receipt for name, output in outputs.items() if name in alike)
        wanted = outputs[variant.computes_like].receipt.computed_tokens - own.fresh_tokens
        share = min(1.0, max(0.0, wanted / max(1, own.slid_tokens)))
        return {**variant.settings, "correction_share": share}

    def _use(self, settings: Mapping[str, Any]) -> None:
        self._engine.adjust(**{**self._settings, **settings})

    def _clean_up(self) -> None:
        self._use({})
        for namespace in {_namespace(variant.policy) for variant in self._variants}:
            self._engine.forget(_SESSION, namespace=namespace)


_SESSION = "bench"


def _namespace(policy: str) -> str:
    """Where a policy's first turn is cached: one place for all that keep KV in context, which is then the same."""
    return "bench in context" if policy_named(policy).isolation is None else f"bench {policy}"


def _continuing(turns: Turns, value: str) -> str:
    """A value as the second prompt's text would go on with it: after a space, unless it brings or finds white space."""
    return value if value[0].isspace() or turns.second.text[-1].isspace() else f" {value}"


def _cksim(
    reused: torch.Tensor | None, full: torch.Tensor | None, receipt: Receipt
) -> tuple[float, float] | tuple[None, None]:
    """CKSim of the slid tokens' keys and of their values, mean over layers.

    Args:
        reused: (layers, tokens, 2 * kv_heads, head_dim): keys, rotated, before values.
        full: The same of the full prefill.
        receipt: Says which tokens slid.
    """
    if reused is None or full is None:
        return None, None
    slid = [
        token
        for start, stop, treatment in receipt.treatments
        if treatment in ("slid", "corrected")
        for token in range(start, stop)
    ]
    keys, values = cksim_by_layer(reused[:, slid], full[:, slid])
    return mean(keys), mean(values)
