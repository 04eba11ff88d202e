"""Two turns of an agent whose memory is edited, and a tiny engine to take them."""

from __future__ import annotations

from cacheslide_agents.engine import Engine, EngineConfig, Prompt, Receipt, SamplingParams, Segment
from cacheslide_agents.engine.reuse.index import CachedSequence
from tests.tiny import tiny_model, tiny_tokenizer

SYSTEM = "You are a helpful assistant with a memory of what the user told you.\n"
OLD = "memory: the user lives in Paris and likes tea.\n"
NEW = "memory: the user moved to a small house by the sea, likes coffee now, and has a dog.\n"
HISTORY = "".join(f"user: question number {n}?\nassistant: the answer is {n * 7}.\n" for n in range(12))
QUERY = "user: what does the memory say?\nassistant:"
ANSWER = " the memory says that the user lives in Paris"
FEW = SamplingParams(max_tokens=8, ignore_eos=True)


def first_turn() -> Prompt:
    return Prompt([Segment.system(SYSTEM), Segment.update(OLD), Segment.suffix(HISTORY)])


def second_turn() -> Prompt:
    return Prompt([Segment.system(SYSTEM), Segment.update(NEW), Segment.suffix(HISTORY), Segment.suffix(QUERY)])


def tiny_engine(family: str = "llama", **settings) -> Engine:
    settings = {"pool_tokens": 8192, "dtype": "float32", **settings}
    return Engine.from_model(tiny_model(family), tiny_tokenizer(None), EngineConfig(**settings))


def two_turns(engine: Engine, session: str = "s") -> CachedSequence:
    """Takes both turns; the second one's sequence as it is cached."""
    engine.generate(first_turn(), FEW, session=session)
    engine.generate(second_turn(), FEW, session=session)
    return latest(engine)


def sequences(engine: Engine) -> list[CachedSequence]:
    """All that is cached, the most recently used first."""
    found: list[CachedSequence] = engine._runner.preparation.index.by_recency()
    return found


def latest(engine: Engine) -> CachedSequence:
    """The most recently used cached sequence."""
    return sequences(engine)[0]


def staleness_of(receipt: Receipt) -> float:
    """The measured staleness; fails where it was not measured."""
    assert receipt.staleness is not None, f"{receipt.policy} measured no staleness"
    return receipt.staleness
