"""Means and medians of measurements, one summary a variant and set of turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from .answers import AnswerScores
from .comparison import Measurement
from .variants import REFERENCES


@dataclass(frozen=True)
class Summary:
    """One variant over a set of turns. None where nothing was there to measure.

    Attributes:
        turn_set: The set's name.
        variant: The variant's name.
        prompts: Pairs of turns measured.
        fallbacks: Those of them in which less was reused than the policy allows.
        sliding: Those of them in which text slid; the others tell nothing of what reuse costs.
        ttft_seconds: Median time to the first token.
        of_prefix: That time over `prefix`'s on the same turns, median of the ratios.
        of_recompute: The same over `recompute`'s.
        computed: Mean share of the prompt's tokens that were computed.
        computed_layers: Mean share of token-layers that were computed: some policies take slid tokens through a few
            layers only.
        corrected: Mean share of the slid tokens that were corrected.
        mean_kl: Mean over the turns of KL(full ‖ variant) over the answer's tokens, nats.
        median_kl: Its median.
        max_kl: Its largest.
        agreement: Share of the next tokens that are the full prefill's, where that one is sure.
        clear_tokens: How many tokens that share is of.
        leak: Mean change of the old value's log-probability, nats.
        key_cksim: Mean CKSim of the slid tokens' keys.
        value_cksim: The same of their values.
        gold_f1: Mean F1 of the answers against the gold ones.
        gold_exact_match: Mean exact match with them.
        gold_rouge_l_recall: Mean ROUGE-L recall of them.
        full_f1: Mean F1 of the answers against the full prefill's.
        full_exact_match: Mean exact match with them.
        full_rouge_l_recall: Mean ROUGE-L recall of them.
    """

    turn_set: str
    variant: str
    prompts: int
    fallbacks: int
    sliding: int
    ttft_seconds: float
    of_prefix: float
    of_recompute: float
    computed: float
    computed_layers: float
    corrected: float
    mean_kl: float
    median_kl: float
    max_kl: float
    agreement: float | None
    clear_tokens: int
    leak: float | None
    key_cksim: float | None
    value_cksim: float | None
    gold_f1: float | None
    gold_exact_match: float | None
    gold_rouge_l_recall: float | None
    full_f1: float
    full_exact_match: float
    full_rouge_l_recall: float


def summarize(turn_set: str, measured: Sequence[Sequence[Measurement]]) -> list[Summary]:
    """A summary of each variant, in their order.

    Args:
        turn_set: The set's name.
        measured: For each pair of turns, at least one, the variants' measurements in one order.
    """
    references: dict[str, list[float]] = {
        name: [next(one.ttft_seconds for one in turns if one.variant == name) for turns in measured]
        for name in REFERENCES
    }
    return [_summary(turn_set, list(of_variant), references) for of_variant in zip(*measured, strict=True)]


def _summary(turn_set: str, ones: list[Measurement], references: dict[str, list[float]]) -> Summary:
    kls = [one.kl for one in ones]
    clear = sum(one.clear_tokens for one in ones)
    gold = [one.to_gold for one in ones if one.to_gold is not None]
    full = [one.to_full for one in ones]
    return Summary(
        turn_set=turn_set,
        variant=ones[0].variant,
        prompts=len(ones),
        fallbacks=sum(one.receipt.fallback is not None for one in ones),
        sliding=sum(one.receipt.slid_tokens > 0 for one in ones),
        ttft_seconds=median(one.ttft_seconds for one in ones),
        of_prefix=_ratio(ones, references["prefix"]),
        of_recompute=_ratio(ones, references["recompute"]),
        computed=mean(one.computed_share for one in ones),
        computed_layers=mean(one.receipt.computed_share for one in ones),
        corrected=mean(one.corrected_share for one in ones),
        mean_kl=mean(kls),
        median_kl=median(kls),
        max_kl=max(kls),
        agreement=sum(one.agreeing_tokens for one in ones) / clear if clear else None,
        clear_tokens=clear,
        leak=_mean(one.leak for one in ones),
        key_cksim=_mean(one.key_cksim for one in ones),
        value_cksim=_mean(one.value_cksim for one in ones),
        gold_f1=_score(gold, lambda scores: scores.f1),
        gold_exact_match=_score(gold, lambda scores: scores.exact_match),
        gold_rouge_l_recall=_score(gold, lambda scores: scores.rouge_l_recall),
        full_f1=mean(scores.f1 for scores in full),
        full_exact_match=mean(scores.exact_match for scores in full),
        full_rouge_l_recall=mean(scores.rouge_l_recall for scores in full),
    )


def _ratio(ones: Sequence[Measurement], reference: Sequence[float]) -> float:
    return median(one.ttft_seconds / seconds for one, seconds in zip(ones, reference, strict=True))


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return mean(there) if there else None


def _score(scores: Sequence[AnswerScores], part: Callable[[AnswerScores], float]) -> float | None:
    return _mean(map(part, scores))
