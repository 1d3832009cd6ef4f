"""The scheduler's choices: who computes how much in which step, who waits, who gives way.

That the tokens come out right under any of them is test_engine_core.py's matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from bitnet_ops.generate.engine import Limits
from bitnet_ops.generate.request import Request
from bitnet_ops.generate.scheduler import Scheduler, SchedulerOptions
from bitnet_ops.nn.blocks import BlockAllocator, PoolFullError

LIMITS = Limits(10_000)


class Driver:
    """A scheduler whose requests produce the token 1, step after step."""

    def __init__(self, blocks: int = 1000, block_size: int = 16, **options: Any) -> None:
        self.allocator = BlockAllocator(blocks)
        self.copies: list[tuple[int, int]] = []
        self.drafts: Sequence[int] = ()
        self.scheduler = Scheduler(
            self.allocator,
            block_size,
            100_000,
            lambda source, target: self.copies.append((source, target)),
            SchedulerOptions(**options),
            lambda ids, most: self.drafts[:most],
        )
        self.requests: list[Request] = []
        self.failed: dict[int, Exception] = {}

    def add(self, prompt: int | list[int], max_drafts: int = 0) -> Request:
        ids = prompt if isinstance(prompt, list) else [len(self.requests)] * prompt
        request = Request(len(self.requests), ids, None, LIMITS, max_drafts=max_drafts)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> dict[int, int]:
        """Run a step; new tokens by request, drafts among them."""
        plan = self.scheduler.schedule()
        self.failed |= {request.id: error for request, error in plan.failed}
        counts = {}
        for id, step in plan.steps.items():
            counts[id] = len(step.token_ids)
            if step.logits:
                step.request.accept(1, 100_000)
            self.scheduler.computed(step, 0)
        assert sum(counts.values()) == plan.tokens <= self.scheduler.options.token_budget
        return counts

    @property
    def running(self) -> list[int]:
        return [request.id for request in self.scheduler.running]

    @property
    def waiting(self) -> list[int]:
        return [request.id for request in self.scheduler.waiting]


def test_streams_go_on_in_every_step_while_a_long_prompt_is_admitted() -> None:
    driver = Driver(most_gap=math.inf)
    for _ in range(15):
        driver.add(3)
    driver.step()
    driver.add(2048)
    steps = 0
    while driver.requests[15].remaining > 1:
        counts = driver.step()
        assert all(counts[id] == 1 for id in range(15))
        assert sum(counts.values()) <= 256
        steps += 1
    assert steps == -(-2048 // (256 - 15))


def test_prompt_tokens_beside_streams_follow_what_steps_cost() -> None:
    """A token of a prompt costs a tenth of a step: twice a step is ten of them."""
    driver = Driver()
    for _ in range(3):
        driver.add(3)
    driver.step()
    for _ in range(3):
        driver.scheduler.pace.learn(3, 0, 1.0)
        driver.scheduler.pace.learn(3, 20, 3.0)
    driver.add(100)
    assert driver.step() == {0: 1, 1: 1, 2: 1, 3: 10}
    for id in range(3):
        driver.scheduler.remove(driver.requests[id])
    assert driver.step() == {3: 90}  # nobody waits for it


def test_prompts_beside_streams_may_be_held_short() -> None:
    driver = Driver(prefill_beside_decode=30, most_gap=math.inf)
    driver.add(500)
    assert driver.step() == {0: 256}, "nobody waits for its next token"
    assert driver.step() == {0: 244}
    driver.add(100)
    driver.add(100)
    assert [driver.step() for _ in range(4)] == [{0: 1, 1: 30}] * 3 + [{0: 1, 1: 10, 2: 20}]


def test_prompts_share_a_step_oldest_first() -> None:
    driver = Driver(token_budget=10, max_sequences=4)
    for tokens in (4, 12, 3, 2):
        driver.add(tokens)
    assert driver.step() == {0: 4, 1: 6}
    assert driver.step() == {0: 1, 1: 6, 2: 3}
    assert driver.step() == {0: 1, 1: 1, 2: 1, 3: 2}
    assert driver.step() == {0: 1, 1: 1, 2: 1, 3: 1}


def test_no_more_run_at_once_than_allowed() -> None:
    driver = Driver(max_sequences=2)
    for _ in range(3):
        driver.add(3)
    assert driver.step() == {0: 3, 1: 3} and driver.waiting == [2]
    driver.scheduler.remove(driver.requests[0])
    assert driver.step() == {1: 1, 2: 3}


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    driver = Driver(blocks=6, block_size=4, prefix_cache=False, watermark=0.0)
    for _ in range(4):
        driver.add(3)  # one block each; a second from the fifth token on
    assert driver.step() == {0: 3, 1: 3, 2: 3, 3: 3}
    driver.step()
    assert driver.running == [0, 1, 2, 3]
    counts = driver.step()
    assert driver.running == [0, 1, 2] and driver.waiting == [3]
    assert counts == {0: 1, 1: 1, 2: 1}
    assert (driver.requests[3].computed, driver.requests[3].blocks) == (0, [])
    driver.add(1)
    for _ in range(4):
        driver.step()
    assert driver.running == [0, 1] and driver.waiting == [2, 3, 4]
    assert driver.scheduler.preemptions == 2
    for request in driver.requests[:2]:
        driver.scheduler.remove(request)
    assert driver.step() == {2: 9, 3: 5, 4: 1}, "what they had is computed again, and no more"
    assert [request.preemptions for request in driver.requests] == [0, 0, 1, 1, 0]


def test_preempted_tokens_come_from_the_prefix_cache_if_they_are_still_there() -> None:
    driver = Driver(blocks=8, block_size=4, watermark=0.0)
    driver.add(15)
    driver.add(15)
    driver.step()
    driver.step()
    driver.step()
    assert driver.running == [0] and driver.waiting == [1]
    driver.scheduler.remove(driver.requests[0])
    assert driver.step()[1] == 17 - 12, "three blocks of four were found, the other was needed"
    assert driver.requests[1].reused_tokens == 0, "of its first admission"


def test_room_to_grow_is_left_when_others_run() -> None:
    driver = Driver(blocks=10, block_size=4, watermark=0.3)
    driver.add(12)
    driver.add(16)
    driver.add(4)
    driver.step()
    assert driver.running == [0, 1] and driver.waiting == [2]
    assert driver.allocator.free_blocks == 3
    driver.scheduler.remove(driver.requests[0])
    driver.step()
    assert driver.running == [1, 2]


def test_one_alone_may_have_everything() -> None:
    driver = Driver(blocks=4, block_size=4, watermark=0.5)
    driver.add(16)
    assert driver.step() == {0: 16} and driver.allocator.free_blocks == 0


def test_what_can_never_fit_fails_alone() -> None:
    driver = Driver(blocks=4, block_size=4)
    driver.add(4)
    driver.step()
    too_long = driver.add(17)
    driver.add(4)
    assert driver.step() == {0: 1, 2: 4}
    error = driver.failed[too_long.id]
    assert isinstance(error, PoolFullError) and (error.needed, error.free) == (5, 2)


def test_what_grows_beyond_the_pool_fails() -> None:
    driver = Driver(blocks=2, block_size=4)
    driver.add(7)
    driver.step()
    driver.step()
    assert driver.failed == {} and driver.step() == {}
    error = driver.failed[0]
    assert isinstance(error, PoolFullError) and (error.needed, error.free) == (1, 0)
    assert driver.allocator.used_blocks == 0 and driver.running == []


def test_drafts_take_what_the_decode_tokens_leave() -> None:
    driver = Driver(token_budget=10, max_sequences=4)
    for _ in range(3):
        driver.add(2, max_drafts=5)
    driver.step()
    driver.drafts = [1, 1, 1, 1]
    assert driver.step() == {0: 5, 1: 4, 2: 1}
    driver.add(30)
    assert driver.step() == {0: 4, 1: 1, 2: 1, 3: 4}, "a prompt that waits has half of the rest"
    assert driver.step() == {0: 4, 1: 1, 2: 1, 3: 4}


def test_drafts_preempt_nobody_and_their_blocks_go_back() -> None:
    driver = Driver(blocks=6, block_size=4, watermark=0.0)
    driver.add(3, max_drafts=5)
    driver.add(3, max_drafts=5)
    driver.step()
    driver.drafts = [2] * 5
    assert driver.step() == {0: 6, 1: 6}
    assert driver.allocator.used_blocks == 4, "the rejected drafts hold nothing after the step"
    driver.add(3)
    assert driver.step() == {0: 4, 1: 4, 2: 3}
    assert driver.scheduler.preemptions == 0


def test_a_fork_in_a_prompt_goes_on_where_it_is() -> None:
    driver = Driver(token_budget=10, max_sequences=4, block_size=4)
    parent = driver.add(25)
    driver.step()
    child = parent.fork(1, None, LIMITS)
    driver.requests.append(child)
    driver.scheduler.fork(parent, child)
    assert child.blocks == parent.blocks[:3] and child.computed == 10
    assert driver.step() == {0: 10}
    assert driver.step() == {0: 5, 1: 5}
    assert len(driver.copies) == 1 and driver.copies[0][0] == child.blocks[2]
    assert parent.blocks[:2] == child.blocks[:2]


def test_what_a_fork_overwrites_is_not_found_again() -> None:
    """Forked while the model ran: the parent's drafts of that step lie where the child writes."""
    driver = Driver(block_size=8)
    parent = driver.add(3, max_drafts=2)
    driver.step()
    driver.drafts = [1, 1]
    step = driver.scheduler.schedule().steps[0]
    child = parent.fork(1, None, LIMITS)
    driver.scheduler.fork(parent, child)
    for _ in range(3):
        parent.accept(1, 100)
    driver.scheduler.computed(step, 2)
    driver.scheduler.remove(parent)
    (block,) = child.blocks
    contents = driver.allocator.contents(block)
    assert contents is not None and list(contents.token_ids) == [0, 0, 0, 1, 1, 1]
    driver.requests.append(child)
    driver.step()
    assert child.blocks == [block] and driver.allocator.contents(block) is None


def test_the_rest_of_a_block_is_written_in_place_if_nobody_has_it() -> None:
    driver = Driver(block_size=8)
    driver.add([1, 2, 3])
    driver.step()
    (block,) = driver.requests[0].blocks
    driver.scheduler.remove(driver.requests[0])
    driver.add([1, 2, 3, 4])
    assert driver.step() == {1: 1} and driver.requests[1].blocks == [block]
    driver.add([1, 2, 3, 4, 5])
    assert driver.step() == {1: 1, 2: 2}, "that of others is copied, as far as it is known"
    assert driver.copies == [(block, driver.requests[2].blocks[0])]
    assert [r.reused_tokens for r in driver.requests] == [0, 3, 3]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token_budget": 0}, "expected token_budget an integer above 0, got 0"),
        ({"prefill_beside_decode": 0}, "prefill_beside_decode an integer above 0, got 0"),
        ({"max_sequences": True}, "expected max_sequences an integer above 0, got True"),
        ({"max_sequences": 300}, "expected max_sequences at most token_budget 256, got 300"),
        ({"watermark": 1}, "expected watermark from 0 to 1, got 1"),
    ],
)
def test_options_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerOptions(**wrong)
