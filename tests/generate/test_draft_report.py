"""What is said of drafts: counts by source, of requests and engines, and the remark on a head."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest

from bitnet_ops import LanguageModel, load
from bitnet_ops.generate.draft_choice import Source
from bitnet_ops.generate.draft_planner import DraftPlanner
from bitnet_ops.generate.draft_report import NO_DRAFTS, DraftCounts, HeadReport, Verified
from bitnet_ops.generate.engine import Event, Finished, Limits, NewToken
from bitnet_ops.generate.step_plan import PlannedStep
from paged_fake import VOCAB, FakeEngine, FakeModel, periodic

PROMPT = list(range(VOCAB)) * 2  # goes on from its beginning, as `periodic` does


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return load()


def test_counts_by_source_add_up() -> None:
    counts, sums = NO_DRAFTS, {"ngram": [0, 0], "head": [0, 0]}
    draw = random.Random(0)
    for _ in range(50):
        source: Source = draw.choice(["ngram", "head"])
        drafted = draw.randrange(9)
        accepted = draw.randint(0, drafted)
        counts = counts.plus(source, drafted, accepted)
        sums[source][0] += drafted
        sums[source][1] += accepted
    assert [list(counts.ngram), list(counts.head)] == [sums["ngram"], sums["head"]]
    assert counts.drafted == sums["ngram"][0] + sums["head"][0]
    assert counts.accepted == sums["ngram"][1] + sums["head"][1]


def test_json_has_the_sources_that_drafted() -> None:
    assert NO_DRAFTS.as_dict() == {}
    assert DraftCounts(head=Verified(5, 0)).as_dict() == {"head": {"drafted": 5, "accepted": 0}}


def run(engine: FakeEngine) -> list[Event]:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return events


def test_events_carry_what_was_drafted_until_then() -> None:
    """A step gives one token more than it has right drafts."""
    engine = FakeEngine(model=FakeModel(logits=periodic))
    engine.add(PROMPT, limits=Limits(21), max_drafts=4)
    *tokens, end = run(engine)
    assert isinstance(end, Finished) and end.drafts == DraftCounts(Verified(16, 16))
    steps = [1, *(5 for _ in range(4))]
    wanted = [4 * i for i, count in enumerate(steps) for _ in range(count)]
    assert [t.drafts.accepted for t in tokens if isinstance(t, NewToken)] == wanted


def test_events_are_equal_whatever_was_drafted() -> None:
    drafts = DraftCounts(Verified(3, 2))
    assert NewToken(1, 2, drafts=drafts) == NewToken(1, 2)
    assert Finished(1, "stop", drafts=drafts) == Finished(1, "stop")


def test_requests_beside_each_other_have_counts_of_their_own() -> None:
    engine = FakeEngine(model=FakeModel(logits=periodic))
    ids = [
        engine.add(PROMPT, limits=Limits(20 + i), max_drafts=drafts)
        for i, drafts in enumerate((0, 1, 4, "auto"))
    ]
    ends = {e.request_id: e.drafts for e in run(engine) if isinstance(e, Finished)}
    first, second, *_ = (ends[id] for id in ids)
    assert first == NO_DRAFTS
    assert second.accepted <= 10 and second.ngram == (second.drafted, second.accepted)
    stats = engine.stats()
    assert stats.drafts.drafted == stats.drafted_tokens == sum(e.drafted for e in ends.values())
    assert stats.drafts.accepted == stats.accepted_drafts == sum(e.accepted for e in ends.values())


def test_an_aborted_request_says_what_was_drafted_for_it() -> None:
    engine = FakeEngine(model=FakeModel(logits=periodic))
    id = engine.add(PROMPT, limits=Limits(1000), max_drafts=4)
    for _ in range(3):
        engine.step()
    engine.abort(id)
    (end,) = engine.step()
    assert isinstance(end, Finished) and end.drafts.ngram == Verified(8, 8)


@pytest.mark.parametrize("stop", ["the son of", ()])
def test_a_completion_and_a_stream_say_so(demo: LanguageModel, stop: Any) -> None:
    text = "the son of Adam, which was the son of Adam, which was"
    options: dict[str, Any] = {"max_new_tokens": 40, "speculation": 4, "stop": stop}
    before = demo.engine.stats().drafts
    answer = demo.generate(text, **options)
    after = demo.engine.stats().drafts
    assert 0 < answer.drafts.accepted <= answer.drafts.drafted
    assert answer.drafts.accepted <= len(answer.token_ids)
    assert after.drafted - before.drafted >= answer.drafts.drafted
    stream = demo.stream(text, **options)
    assert stream.read().drafts == stream.generation.drafts == answer.drafts
    assert demo.generate(text, max_new_tokens=9, speculation="off").drafts == NO_DRAFTS


# The remark ---------------------------------------------------------------------------------------


def remarks(steps: Sequence[tuple[int, int]]) -> list[str]:
    report = HeadReport()
    found = [remark for step in steps if (remark := report.add(*step)) is not None]
    assert report.remark == (found[0] if found else None)
    return found


def test_nothing_is_said_before_200_drafts() -> None:
    assert remarks([(1, 0)] * 199) == []
    (said,) = remarks([(1, 0)] * 200)
    assert "got 0 % of 200" in said


@pytest.mark.parametrize(("right", "said"), [(0, 1), (10, 1), (19, 1), (20, 0), (21, 0), (80, 0)])
def test_a_fifth_of_the_drafts_has_to_be_right(right: int, said: int) -> None:
    steps = [(1, int(i < right)) for i in range(100)]
    random.Random(1).shuffle(steps)
    assert len(remarks(steps * 10)) == said


def test_drafts_behind_a_wrong_one_do_not_count() -> None:
    """A head that is right for 30 % has 14 % of drafts by three accepted, and is no wrong one."""
    draw, steps = random.Random(2), []
    for _ in range(3000):
        right = 0
        while right < 3 and draw.random() < 0.3:
            right += 1
        steps.append((3, right))
    assert sum(right for _, right in steps) < 0.15 * 9000
    assert remarks(steps) == []


def test_it_is_said_once_and_has_three_reasons() -> None:
    (said,) = remarks([(3, 0)] * 1000)
    assert "\n" not in said
    for reason in ("another model", "unrotated model", "temperature is above 1"):
        assert reason in said


@pytest.mark.parametrize(("source", "said"), [("head", 1), ("ngram", 0)])
def test_an_engine_logs_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, source: Source, said: int
) -> None:
    verified = DraftPlanner.verified

    def wrong(self: DraftPlanner, step: PlannedStep, accepted: int) -> str | None:
        step.source = source
        return verified(self, step, 0)

    monkeypatch.setattr(DraftPlanner, "verified", wrong)
    engine = FakeEngine(model=FakeModel(logits=periodic))
    assert engine.draft_remark is None
    for _ in range(3):
        engine.add(PROMPT, limits=Limits(150), max_drafts=1)
        with caplog.at_level(logging.WARNING):
            run(engine)
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == said
    assert [engine.draft_remark] == (messages or [None])
    drafted = getattr(engine.stats().drafts, source)
    assert drafted.drafted > 200 and drafted.accepted == 0
