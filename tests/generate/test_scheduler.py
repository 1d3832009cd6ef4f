"""The scheduler's choices: who computes how much in which step, who waits, who gives way.

Seen by a model that counts the tokens that it is given. That the tokens come out right under any
schedule is test_schedules.py's matter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitnet_ops.generate import draft_planner
from bitnet_ops.generate.engine import Failed, Limits, SchedulerOptions
from bitnet_ops.nn.blocks import PoolFullError
from paged_fake import VOCAB, FakeEngine, FakeModel

LIMITS = Limits(10_000)


class Driver(FakeEngine):
    """An engine whose requests produce the token 1, step after step; each prompt is another."""

    def __init__(self, blocks: int = 1000, block_size: int = 16, **options: Any) -> None:
        model = FakeModel(100_000, lambda ids: torch.eye(VOCAB)[[1]].expand(len(ids), VOCAB))
        super().__init__(blocks, block_size, model, **options)
        self.failed: dict[int, BaseException] = {}
        self.count = 0

    def comes(self, prompt: int | list[int], max_drafts: int = 0) -> int:
        """A request of so many tokens, which no other begins with."""
        ids = prompt if isinstance(prompt, list) else [2 + self.count % 9] * prompt
        self.count += 1
        return self.add(ids, limits=LIMITS, max_drafts=max_drafts)

    def counts(self) -> list[int]:
        """New tokens of a step, drafts among them, the requests in the order of their planning."""
        self.fake.batches.clear()
        for event in self.step():
            if isinstance(event, Failed):
                self.failed[event.request_id] = event.error
        return [n for batch in self.fake.batches for n in batch.query_start_loc.diff().tolist()]

    @property
    def lines(self) -> tuple[int, int]:
        """How many run, and how many wait."""
        stats = self.stats()
        return stats.running, stats.waiting


def test_prompts_beside_streams_are_held_short() -> None:
    driver = Driver(prefill_beside_decode=30)
    driver.comes(500)
    assert driver.counts() == [256], "nobody waits for its next token"
    assert driver.counts() == [244]
    driver.comes(100)
    driver.comes(100)
    assert [driver.counts() for _ in range(4)] == [[1, 30]] * 3 + [[1, 10, 20]]
    free = Driver(prefill_beside_decode=None)
    for _ in range(15):
        free.comes(3)
    free.counts()
    free.comes(2048)
    steps = [free.counts() for _ in range(-(-2048 // (256 - 15)))]
    assert all(counts[:15] == [1] * 15 and sum(counts) <= 256 for counts in steps)
    assert free.counts() == [1] * 16


def test_prompts_share_a_step_oldest_first() -> None:
    driver = Driver(token_budget=10, max_sequences=4)
    for tokens in (4, 12, 3, 2):
        driver.comes(tokens)
    assert [driver.counts() for _ in range(4)] == [[4, 6], [1, 6, 3], [1, 1, 1, 2], [1, 1, 1, 1]]


def test_no_more_run_at_once_than_allowed() -> None:
    driver = Driver(max_sequences=2)
    first, *_ = [driver.comes(3) for _ in range(3)]
    assert driver.counts() == [3, 3] and driver.lines == (2, 1)
    driver.abort(first)
    assert driver.counts() == [1, 3] and driver.lines == (2, 0)


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    driver = Driver(blocks=6, block_size=4, prefix_cache=False, watermark=0.0)
    ids = [driver.comes(3) for _ in range(4)]  # one block each; a second from the fifth token on
    assert driver.counts() == [3, 3, 3, 3] and driver.counts() == [1, 1, 1, 1]
    assert driver.lines == (4, 0)
    assert driver.counts() == [1, 1, 1] and driver.lines == (3, 1)
    driver.comes(1)
    for _ in range(4):
        driver.counts()
    assert driver.lines == (2, 3) and driver.stats().preemptions == 2
    for id in ids[:2]:
        driver.abort(id)
    assert driver.counts() == [9, 5, 1], "what they had is computed again, and no more"


def test_preempted_tokens_come_from_the_prefix_cache_if_they_are_still_there() -> None:
    driver = Driver(blocks=8, block_size=4, watermark=0.0)
    first, _ = driver.comes(15), driver.comes(15)
    for _ in range(3):
        driver.counts()
    assert driver.lines == (1, 1)
    driver.abort(first)
    assert driver.counts() == [17 - 12], "three blocks of four were found, the other was needed"


def test_room_to_grow_is_left_when_others_run_and_one_alone_may_have_everything() -> None:
    driver = Driver(blocks=10, block_size=4, watermark=0.3)
    first, *_ = [driver.comes(n) for n in (12, 16, 4)]
    driver.counts()
    assert driver.lines == (2, 1) and driver.stats().used_blocks == 7
    driver.abort(first)
    driver.counts()
    assert driver.lines == (2, 0)
    alone = Driver(blocks=4, block_size=4, watermark=0.5)
    alone.comes(16)
    assert alone.counts() == [16] and alone.stats().used_blocks == 4


def test_what_cannot_fit_fails_alone() -> None:
    driver = Driver(blocks=4, block_size=4)
    driver.comes(4)
    driver.counts()
    too_long = driver.comes(17)
    driver.comes(4)
    assert driver.counts() == [1, 4]
    error = driver.failed[too_long]
    assert isinstance(error, PoolFullError) and (error.needed, error.free) == (5, 2)
    grows = Driver(blocks=2, block_size=4)
    id = grows.comes(7)
    assert [grows.counts() for _ in range(3)] == [[7], [1], []]
    error = grows.failed[id]
    assert isinstance(error, PoolFullError) and (error.needed, error.free) == (1, 0)
    assert grows.stats().used_blocks == 0 and grows.lines == (0, 0)


def test_drafts_take_what_the_decode_tokens_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_planner, "propose", lambda ids, maximum: [2, 2, 2, 2][:maximum])
    driver = Driver(token_budget=10, max_sequences=4)
    for _ in range(3):
        driver.comes(2, max_drafts=5)
    driver.counts()
    assert driver.counts() == [5, 4, 1]
    driver.comes(30)
    for _ in range(2):
        assert driver.counts() == [4, 1, 1, 4], "a prompt that waits has half of the rest"


def test_drafts_preempt_nobody_and_their_blocks_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_planner, "propose", lambda ids, maximum: [2] * min(5, maximum))
    driver = Driver(blocks=6, block_size=4, watermark=0.0)
    driver.comes(3, max_drafts=5)
    driver.comes(3, max_drafts=5)
    driver.counts()
    assert driver.counts() == [6, 6]
    assert driver.stats().used_blocks == 4, "the rejected drafts hold nothing after the step"
    driver.comes(3)
    assert driver.counts() == [4, 4, 3] and driver.stats().preemptions == 0


def test_the_rest_of_a_block_is_written_in_place_if_nobody_has_it() -> None:
    driver = Driver(block_size=8)
    first = driver.comes([1, 2, 3])
    driver.counts()
    driver.abort(first)
    driver.comes([1, 2, 3, 4])
    assert driver.counts() == [1] and driver.pool.copies == 0
    assert driver.stats().used_blocks == 1
    driver.comes([1, 2, 3, 4, 5])
    assert driver.counts() == [1, 2] and driver.pool.copies == 1, "that of others is copied"
    assert driver.stats().reused_tokens == 3 + 3


@pytest.mark.parametrize("keep", [True, False])
def test_a_conversation_survives_a_burst_of_titles_in_the_background(keep: bool) -> None:
    driver = Driver(blocks=50, block_size=4)
    turn = [1, 2, 3, 4, 5] * 20
    for title in [None, *range(10)]:
        prompt = turn if title is None else [6, title, *range(10)] * 5
        driver.add(prompt, limits=Limits(3), keep_prefix=keep or title is None)
        while driver.has_work:
            driver.step()
    driver.comes([*turn, 7, 7])
    assert driver.counts() == ([102 - 100] if not keep else [102])


def test_what_others_have_used_of_a_title_stays() -> None:
    driver = Driver(blocks=16, block_size=4)
    system = [1, 2, 3, 4] * 4
    for ids in (system + [5] * 8, system + [6] * 8, [7] * 44):
        driver.add(ids, limits=Limits(1), keep_prefix=False)
        while driver.has_work:
            driver.step()
    driver.comes([*system, 8])
    assert driver.counts() == [1], "two titles begin so"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token_budget": 0}, "expected token_budget an integer above 0, got 0"),
        ({"prefill_beside_decode": 0}, "prefill_beside_decode an integer above 0, got 0"),
        ({"max_sequences": True}, "expected max_sequences an integer above 0, got True"),
        ({"max_sequences": 300}, "expected max_sequences at most token_budget 256, got 300"),
        ({"watermark": 1}, "expected watermark from 0 to 1, got 1"),
        ({"watermark": float("nan")}, "expected watermark from 0 to 1, got nan"),
    ],
)
def test_options_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerOptions(**wrong)
