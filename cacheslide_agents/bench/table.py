"""Summaries as tables for people: time against divergence, then the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from rich.console import Console

from ..tables import show_table
from .summary import Summary
from .variants import REFERENCES

Column = tuple[str, Callable[[Summary], object]]

_FIDELITY: tuple[Column, ...] = (
    ("policy", lambda s: s.variant),
    ("first token, s", lambda s: f"{s.ttft_seconds:.3f}"),
    ("of prefix", lambda s: f"{s.of_prefix:.2f}"),
    ("of recompute", lambda s: f"{s.of_recompute:.2f}"),
    ("computed", lambda s: f"{s.computed:.1%}"),
    ("token-layers", lambda s: f"{s.computed_layers:.1%}"),
    ("mean KL", lambda s: s.mean_kl),
    ("median KL", lambda s: s.median_kl),
    ("max KL", lambda s: s.max_kl),
    ("agreement", lambda s: s.agreement),
    ("leak", lambda s: None if s.leak is None else f"{s.leak:+.3f}"),
    ("CKSim K", lambda s: s.key_cksim),
    ("CKSim V", lambda s: s.value_cksim),
)
_ANSWERS: tuple[Column, ...] = (
    ("policy", lambda s: s.variant),
    ("F1", lambda s: s.full_f1),
    ("exact match", lambda s: s.full_exact_match),
    ("ROUGE-L recall", lambda s: s.full_rouge_l_recall),
    ("F1, gold", lambda s: s.gold_f1),
    ("exact match, gold", lambda s: s.gold_exact_match),
    ("ROUGE-L recall, gold", lambda s: s.gold_rouge_l_recall),
)

LEGEND = (
    "Computed: share of the prompt's tokens; token-layers: of all layers of all its tokens. KL: nats between the "
    "next-token distributions of a full prefill and of the policy, over the answer's tokens. Agreement: next "
    "tokens that are the full prefill's, where that one is sure. Leak: by how much more likely the old value is, "
    "in nats. CKSim: cosine of reused and recomputed K and V. Answers: greedy ones, against the full prefill's, "
    "then against the gold answer."
)


def show_summaries(console: Console, summaries: Sequence[Summary]) -> None:
    """Two tables for each set of turns."""
    for name, of_set in groupby(summaries, lambda summary: summary.turn_set):
        rows = list(of_set)
        prompts = "1 prompt" if rows[0].prompts == 1 else f"{rows[0].prompts} prompts"
        kinds = ((f"{prompts}, time and divergence", _FIDELITY), ("answers", _ANSWERS))
        for title, columns in kinds:
            values = [[value(row) for _, value in columns] for row in rows]
            show_table(console, f"{name}: {title}", [column for column, _ in columns], values)
        for row in rows:
            if row.fallbacks:
                console.print(f"{row.variant}: {row.fallbacks} of {row.prompts} fell back", style="yellow")
            if row.variant not in REFERENCES and row.sliding < row.prompts:
                told = f"{row.variant}: no text slid in {row.prompts - row.sliding} of {row.prompts}: "
                console.print(f"{told}these say nothing of what sliding costs", style="yellow", soft_wrap=True)
