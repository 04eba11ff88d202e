"""How alike two answers are: F1 and exact match as SQuAD counts them, and ROUGE-L recall, both from torchmetrics."""

from __future__ import annotations

from dataclasses import dataclass

from cacheslide_agents.engine.errors import CacheSlideError


class MissingExtraError(CacheSlideError):
    """A package of the extra `bench` is absent; the message names the command that installs it."""


@dataclass(frozen=True)
class AnswerScores:
    """An answer against another, each 0 to 1.

    Attributes:
        f1: Of the words, without case, punctuation and articles.
        exact_match: 1 if these words are the same in the same order.
        rouge_l_recall: The longest common subsequence of words, as a share of the wanted answer's; the exact match if
            that one has no words.
    """

    f1: float
    exact_match: float
    rouge_l_recall: float


def require_metrics() -> None:
    """Makes sure that answers can be compared, before anything is measured.

    Raises:
        MissingExtraError: Torchmetrics is absent.
    """
    try:
        import torchmetrics.functional.text  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"comparing answers needs torchmetrics ({error}): pip install 'cacheslide-agents[bench]'"
        ) from error


def compare_answers(answer: str, wanted: str) -> AnswerScores:
    """Scores an answer.

    Args:
        answer: What was answered.
        wanted: What should have been.
    """
    from torchmetrics.functional.text import rouge_score, squad

    words = squad(
        [{"prediction_text": answer, "id": "0"}], [{"answers": {"answer_start": [0], "text": [wanted]}, "id": "0"}]
    )
    exact_match = float(words["exact_match"]) / 100
    has_words = any(character.isalnum() for character in wanted)
    sequence = rouge_score(answer, wanted, rouge_keys="rougeL")
    return AnswerScores(
        f1=float(words["f1"]) / 100,
        exact_match=exact_match,
        rouge_l_recall=float(sequence["rougeL_recall"]) if has_words else exact_match,
    )
