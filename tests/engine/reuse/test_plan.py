"""Properties of every plan, on random conversations that are edited, branched and grown."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheslide_agents.engine.config import EngineConfig, PolicyName
from cacheslide_agents.engine.errors import ConfigError
from cacheslide_agents.engine.reuse.index import CachedSequence, SpaceKey
from cacheslide_agents.engine.reuse.plan import PlanRequest, assert_valid, plan, treatments
from cacheslide_agents.engine.reuse.policies import POLICIES
from cacheslide_agents.engine.reuse.policies.interface import Isolation
from cacheslide_agents.engine.reuse.policies.isolation import missing_segments
from cacheslide_agents.engine.reuse.rules import ByDeviation, ByStaleness, Rule, TokenGate
from cacheslide_agents.engine.reuse.spans import Plan, Span
from cacheslide_agents.engine.segments import EncodedPrompt
from cacheslide_agents.engine.slide.block_table import BlockTable

SPACE = SpaceKey("default", None)
Turn = tuple[list[np.ndarray], np.ndarray, str | None, str]
"""Segments, reply, session and policy."""


def request_for(
    segments: list[np.ndarray], session: str | None, cached: list[CachedSequence], **knobs: object
) -> PlanRequest:
    starts = np.cumsum([0, *(len(segment) for segment in segments)])[:-1]
    tokens = np.concatenate(segments).astype(np.int64)
    prompt = EncodedPrompt(tokens, tuple(starts.tolist()), ("update", *["suffix"] * (len(segments) - 1)))  # type: ignore[arg-type]
    return PlanRequest(prompt, session, cached, EngineConfig().with_changes(**knobs))


@dataclass
class Agent:
    """Carries plans out on paper: caches each turn with the taint and hops that it would have."""

    settings: dict[str, object] = field(default_factory=dict)
    cached: list[CachedSequence] = field(default_factory=list)
    alone: list[CachedSequence] = field(default_factory=list)

    def turn(
        self, segments: list[np.ndarray], reply: np.ndarray, session: str | None, policy: str
    ) -> tuple[PlanRequest, Plan]:
        isolation, tokens = POLICIES[policy].isolation, np.concatenate(segments)
        request = request_for(segments, session, list(self.alone if isolation else self.cached), **self.settings)
        made = plan(policy, request)
        if isolation:
            self.register(request, isolation)
            return request, made
        hops = np.zeros(len(tokens) + len(reply), dtype=np.uint8)
        by_id = {sequence.id: sequence for sequence in self.cached}
        for span in made.spans:
            if span.source is not None and span.source_start is not None:
                source = slice(span.source_start, span.source_start + len(span))
                donor = by_id[span.source]
                moved = donor.positions[source] != made.positions[span.start : span.stop]
                hops[span.start : span.stop] = donor.hops[source] + moved
        hops[made.corrected] = 0
        every = np.concatenate([tokens, reply])
        exact = len(every) if made.exact_tokens == len(tokens) else made.exact_tokens
        number = len(self.cached)
        self.cached.append(
            CachedSequence(
                id=number,
                space=SPACE,
                session=session,
                token_ids=every,
                positions=np.arange(len(every)),
                exact_tokens=exact,
                hops=hops,
                query_positions=np.arange(len(every)),
                staleness=np.zeros(len(every), dtype=np.float32),
                table=BlockTable(),
                last_used=number,
            )
        )
        return request, made

    def register(self, request: PlanRequest, isolation: Isolation) -> None:
        """Caches the segments that no copy holds, each alone."""
        prompt, positions = request.prompt, request.positions
        for start, stop in missing_segments(
            prompt, positions, request.sequences, isolation, request.config.min_slide_tokens
        ):
            number = len(self.alone)
            self.alone.append(
                CachedSequence(
                    id=number,
                    space=SPACE._replace(context="isolated"),
                    session=request.session,
                    token_ids=prompt.token_ids[start:stop],
                    positions=isolation.positions(positions[start:stop]),
                    exact_tokens=stop - start,
                    hops=np.zeros(stop - start, dtype=np.uint8),
                    query_positions=positions[start:stop],
                    staleness=np.zeros(stop - start, dtype=np.float32),
                    table=BlockTable(),
                    last_used=number,
                )
            )


@st.composite
def agents_turns(draw: st.DrawFn) -> list[Turn]:
    """Prompts that come from one another by inserting, deleting, replacing and truncating segments."""
    vocab = draw(st.sampled_from([3, 50, 5_000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def segment() -> np.ndarray:
        return rng.integers(0, vocab, draw(st.integers(1, 30)))

    segments = [segment() for _ in range(draw(st.integers(1, 6)))]
    turns = []
    for _ in range(draw(st.integers(1, 6))):
        for _ in range(draw(st.integers(0, 3))):
            where = draw(st.integers(0, len(segments) - 1))
            edit = draw(st.sampled_from(["insert", "delete", "replace", "truncate", "grow", "append"]))
            if edit == "insert":
                segments.insert(where, segment())
            elif edit == "append":
                segments.append(segment())
            elif edit == "delete" and len(segments) > 1:
                del segments[where]
            elif edit == "replace":
                segments[where] = segment()
            elif edit == "truncate":
                segments[where] = segments[where][: 1 + len(segments[where]) // 2]
            elif edit == "grow":
                segments[where] = np.concatenate([segments[where], segment()])
        reply = segment()
        session = draw(st.sampled_from(["a", "a", "b", None]))
        policy = draw(st.sampled_from(["slide", "head", *POLICIES]))
        turns.append((list(segments), reply, session, policy))
        if draw(st.booleans()):
            segments.append(reply)
    return turns


knobs = st.fixed_dictionaries(
    {
        "correction_share": st.sampled_from([0.0, 0.1, 0.35, 1.0]),
        "min_slide_tokens": st.sampled_from([1, 4, 16]),
        "max_hops": st.sampled_from([0, 1, 20]),
        "share_slid": st.booleans(),
        "deviation_share": st.sampled_from([0.0, 0.26, 1.0]),
        "cacheblend_share": st.sampled_from([0.0, 0.18]),
        "epic_head_tokens": st.sampled_from([0, 3, 32]),
        "epic_tail_tokens": st.sampled_from([0, 3, 32]),
    }
)


@settings(max_examples=300, deadline=None)
@given(agents_turns(), knobs)
def test_every_plan_is_valid_and_true_when_conversations_are_edited(
    turns: list[Turn], knobs: dict[str, object]
) -> None:
    agent = Agent(knobs)
    for segments, reply, session, policy in turns:
        request, made = agent.turn(segments, reply, session, policy)
        assert_valid(made)
        assert made.num_tokens == len(np.concatenate(segments))
        assert made.policy == policy
        np.testing.assert_array_equal(made.positions, np.arange(made.num_tokens))
        if POLICIES[policy].isolation:
            assert_isolated(request, made)
        else:
            assert_sources(request, made)
        if policy == "head":
            assert_heads(request, made)
        elif policy != "epic":
            assert len(made.corrected) == 0
        assert_rule(request, made)
        if policy == "recompute":
            assert [span.treatment for span in made.spans] == ["fresh"]
        if policy == "prefix":
            assert all(span.treatment != "slid" for span in made.spans)
        assert_counts(made)


def assert_rule(request: PlanRequest, made: Plan) -> None:
    """Correction is left to a rule only where something slides that may need it."""
    slid = [span for span in made.spans if span.treatment == "slid"]
    changed = any(span.after_change for span in slid)
    expected: Rule | None = None
    if made.policy == "slide" and slid and request.config.correction_share:
        expected = ByStaleness(request.config.staleness_bound, request.config.correction_share)
    elif made.policy == "deviation" and slid and request.config.deviation_share:
        share = request.config.deviation_share
        expected = ByDeviation(share) if changed or share == 1.0 else None
    elif made.policy == "cacheblend" and slid and request.config.cacheblend_share:
        expected = ByDeviation(request.config.cacheblend_share)
    elif made.policy == "paper" and changed:
        expected = ByDeviation(0.26, fusion="alpha", gate=TokenGate(4, 0.12, "converged"))
    assert made.correction == expected


def assert_isolated(request: PlanRequest, made: Plan) -> None:
    """What is reused are segments, nearly whole, in copies of their own; the first is exact if it did not move."""
    by_id = {sequence.id: sequence for sequence in request.sequences}
    ranges = dict(request.prompt.segment_ranges())
    tokens = request.prompt.token_ids
    for span in made.spans:
        if span.source is None:
            continue
        copy = by_id[span.source]
        assert span.source_start == 0 and span.start in ranges
        assert len(span) >= max(
            request.config.min_slide_tokens, min(ranges[span.start], len(tokens) - 1) - span.start - 4
        )
        np.testing.assert_array_equal(tokens[span.start : span.stop], copy.token_ids[: len(span)])
        moved = int(copy.positions[0]) != span.start
        assert not moved or (made.policy != "promptcache" and request.config.max_hops > 0)
        assert (span.treatment == "exact") == (span.start == 0 and not moved)
        if made.policy == "epic" and span.after_change:
            place = set((made.corrected[(made.corrected >= span.start) & (made.corrected < span.stop)]).tolist())
            head, tail = request.config.epic_head_tokens, request.config.epic_tail_tokens
            ends = {*range(span.start, span.start + head), *range(span.stop - tail, span.stop)}
            assert place == ends & set(range(span.start, span.stop))


def assert_sources(request: PlanRequest, made: Plan) -> None:
    """Exact and slid spans hold the tokens of the prompt, from a sequence that may serve."""
    tokens = request.prompt.token_ids
    by_id = {sequence.id: sequence for sequence in request.sequences}
    slid_sources = {span.source for span in made.spans if span.treatment == "slid"}
    assert len(slid_sources) <= 1
    place = 0
    for span in made.spans:
        if span.source is None or span.source_start is None:
            continue
        donor = by_id[span.source]
        source = slice(span.source_start, span.source_start + len(span))
        np.testing.assert_array_equal(tokens[span.start : span.stop], donor.token_ids[source])
        if span.treatment == "exact":
            assert source.stop <= donor.exact_tokens
        else:
            assert request.config.share_slid or (request.session is not None and donor.session == request.session)
            assert len(span) >= request.config.min_slide_tokens
            moved = donor.positions[source] != made.positions[span.start : span.stop]
            assert (donor.hops[source].astype(int) + moved <= request.config.max_hops).all()
            assert source.start >= place
            place = source.stop
            same = np.array_equal(tokens[: span.stop], donor.token_ids[: span.stop])
            same = same and np.array_equal(made.positions[: span.stop], donor.positions[: span.stop])
            assert span.after_change == (not same)
    longest = max((exact_prefix(tokens, sequence) for sequence in request.sequences), default=0)
    first = made.spans[0]
    if made.policy != "recompute":
        assert longest == (len(first) if first.treatment == "exact" else 0)


def exact_prefix(tokens: np.ndarray, sequence: CachedSequence) -> int:
    length = 0
    limit = min(len(tokens) - 1, sequence.exact_tokens)
    while length < limit and tokens[length] == sequence.token_ids[length]:
        length += 1
    return length


def assert_heads(request: PlanRequest, made: Plan) -> None:
    """Correction takes the share it is given, from the head of what follows a change."""
    slid = [span for span in made.spans if span.treatment == "slid"]
    all_slid = [token for span in slid for token in range(span.start, span.stop)]
    if request.config.correction_share == 0.0:
        assert len(made.corrected) == 0
    elif request.config.correction_share == 1.0:
        assert made.corrected.tolist() == all_slid
    else:
        changed = sum(len(span) for span in slid if span.after_change)
        runs = sum(span.after_change for span in slid)
        assert changed * request.config.correction_share <= len(made.corrected) + 1e-6
        assert len(made.corrected) <= changed * request.config.correction_share + runs
        untouched = {t for span in slid if not span.after_change for t in range(span.start, span.stop)}
        assert not untouched & set(made.corrected.tolist())


def assert_counts(made: Plan) -> None:
    """The receipt's runs partition the prompt and say what the plan says."""
    runs = treatments(made)
    assert [run[0] for run in runs] == [0, *(run[1] for run in runs[:-1])]
    assert runs[-1][1] == made.num_tokens
    assert all(before[2] != run[2] for before, run in pairwise(runs))
    counts = {name: sum(stop - start for start, stop, each in runs if each == name) for _, _, name in runs}
    assert counts.get("corrected", 0) == len(made.corrected)
    assert counts.get("fresh", 0) + counts.get("corrected", 0) == len(made.active_tokens())


def test_the_error_lists_the_policies_when_one_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"'best' does not exist: use one of recompute, prefix, .*, slide"):
        plan("best", request_for([np.arange(3)], None, []))


def test_the_registry_has_the_policies_that_settings_allow() -> None:
    assert set(POLICIES) == set(PolicyName.__args__)  # type: ignore[attr-defined]
    assert all(policy.name == name for name, policy in POLICIES.items())


def test_corrected_tokens_are_runs_of_their_own_when_treatments_are_listed() -> None:
    spans = (Span(0, 4, "exact", 0, 0), Span(4, 6, "fresh"), Span(6, 12, "slid", 0, 4, True), Span(12, 13, "fresh"))
    made = Plan(spans, np.arange(13), corrected=np.array([6, 7, 10]))
    assert treatments(made) == (
        (0, 4, "exact"),
        (4, 6, "fresh"),
        (6, 8, "corrected"),
        (8, 10, "slid"),
        (10, 11, "corrected"),
        (11, 12, "slid"),
        (12, 13, "fresh"),
    )


@pytest.mark.parametrize(
    "spans",
    [
        (Span(0, 4, "fresh"), Span(5, 6, "fresh")),
        (Span(0, 4, "fresh"), Span(4, 6, "exact", 0, 4), Span(6, 7, "fresh")),
        (Span(0, 4, "exact", 0, 1), Span(4, 5, "fresh")),
        (Span(0, 4, "slid"), Span(4, 5, "fresh")),
        (Span(0, 4, "exact", 0, 0),),
        (Span(0, 0, "fresh"), Span(0, 4, "fresh")),
    ],
)
def test_a_plan_is_refused_when_its_spans_break_a_rule(spans: tuple[Span, ...]) -> None:
    with pytest.raises(AssertionError):
        assert_valid(Plan(spans, np.arange(spans[-1].stop)))


def test_a_plan_is_refused_when_a_fresh_token_is_corrected() -> None:
    with pytest.raises(AssertionError, match="not slid"):
        assert_valid(Plan((Span(0, 4, "fresh"),), np.arange(4), corrected=np.array([1])))
