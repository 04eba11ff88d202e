"""Scores of answers against values worked out by hand."""

from __future__ import annotations

import sys

import pytest

from cacheslide_agents.bench.answers import MissingExtraError, compare_answers, require_metrics


def test_scores_are_those_worked_out_by_hand_when_answers_overlap() -> None:
    scores = compare_answers("The red cat sat.", "a cat sat down quietly")
    # Without article and full stop: red cat sat against cat sat down quietly; two words are shared.
    precision, recall = 2 / 3, 2 / 4
    assert scores.f1 == pytest.approx(2 * precision * recall / (precision + recall))
    assert scores.exact_match == 0
    # Articles count here: "cat sat" is the longest common subsequence of the five wanted words.
    assert scores.rouge_l_recall == pytest.approx(2 / 5)


def test_match_is_exact_when_only_case_punctuation_and_articles_differ() -> None:
    scores = compare_answers(" The Orange.", "orange")
    assert (scores.f1, scores.exact_match, scores.rouge_l_recall) == (1, 1, 1)


def test_order_counts_when_words_are_swapped() -> None:
    scores = compare_answers("green and blue", "blue and green")
    assert (scores.f1, scores.exact_match) == (1, 0)
    assert scores.rouge_l_recall == pytest.approx(1 / 3)


def test_scores_are_nothing_when_the_answer_is_empty() -> None:
    scores = compare_answers("", "orange")
    assert (scores.f1, scores.exact_match, scores.rouge_l_recall) == (0, 0, 0)


@pytest.mark.parametrize(("answer", "score"), [(" ", 1), ("orange", 0)])
def test_only_an_answer_without_words_is_right_when_none_are_wanted(answer: str, score: float) -> None:
    scores = compare_answers(answer, ":\n")
    assert (scores.f1, scores.exact_match, scores.rouge_l_recall) == (score, score, score)


def test_error_names_the_extra_when_torchmetrics_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    require_metrics()
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.text", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'cacheslide-agents\[bench\]'"):
        require_metrics()
