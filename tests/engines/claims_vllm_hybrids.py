"""Hybrids in the real vLLM: tokens are those of our own `generate`, whatever vLLM does meanwhile.

Chunks of prompts, batches, reused prefixes, eviction, preemption, seeds; and faults in what is kept
of states, planted on purpose, change tokens.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys

import claims_serving
import openai
import pytest
from environment import child_environment

from engines import chosen

pytestmark = [pytest.mark.hybrids, pytest.mark.of("vllm")]
SHARED = (1, 63, 64, 65, 300)
# the kind of hybrid: options of vLLM
PLANS = {
    "plain": {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 16},
    "plain-tied": {"max_num_batched_tokens": 64, "enable_prefix_caching": False},
    "rotated": {"max_num_batched_tokens": 200, "prefix_match_unit": 64},
    "square": {"max_num_batched_tokens": 512, "prefix_match_unit": 32, "block_size": 32},
}


@pytest.fixture(scope="session")
def hybrids(work):
    """The folder of converted hybrids of every kind."""
    folder = work / "hybrids"
    for name in PLANS:
        claims_serving.script(work, "checkpoints.py", f"hybrid-{name}", "hybrid", folder, name)
    return folder


def ids(seed, count):
    return random.Random(seed).choices(range(3, 300), k=count)


def report_of(work, hybrids, name, options, rounds):
    plan, result = work / f"plan-{name}.json", work / f"hybrid-{name}.json"
    options = {"max_model_len": 1536, **options}
    plan.write_text(json.dumps({"options": options, "rounds": rounds}))
    result.unlink(missing_ok=True)
    arguments = hybrids / f"{name.split('.')[0]}-bin", work / f"for-vllm-{name}", plan, result
    env = {**child_environment(), **chosen().environment(1)}
    claims_serving.script(work, "vllm_hybrids.py", f"hybrid-{name}", *arguments, env=env)
    return json.loads(result.read_text())


def assert_own(rounds):
    for i, one in enumerate(rounds):
        assert one["tokens"] == one["own"], i


@pytest.mark.parametrize("name", PLANS)
def test_tokens_are_those_of_generate(work, hybrids, name):
    """384 greedy tokens over 8 prompts; batches of 1 to 16; prefixes that requests share."""
    eight = [ids(i, 20 + 60 * i) for i in range(8)]
    rounds = [{"prompts": eight, "tokens": 48}]
    rounds += [
        {"prompts": [ids(100 + n, 7 + 19 * i) for i in range(n)], "tokens": 8}
        for n in (1, 2, 5, 16)
    ]
    first = len(rounds)
    for shared in SHARED:
        head = ids(200 + shared, shared)
        rounds += [{"prompts": [head + ids(300 + shared + i, 40)], "tokens": 8} for i in range(3)]
        rounds.append({"prompts": [head + ids(400 + i, n) for i, n in enumerate((1, 30, 90))],
                       "tokens": 8})  # fmt: skip
    report = report_of(work, hybrids, name, PLANS[name], rounds)
    assert_own(report["rounds"])
    cached = [max(one["cached"]) for one in report["rounds"][first + 3 :: 4]]
    unit = PLANS[name].get("prefix_match_unit")
    assert report["mode"] == ("none" if "enable_prefix_caching" in PLANS[name] else "align")
    # where prefixes are told in pieces smaller than a block, what is shared is not computed again
    assert cached == ([n // unit * unit for n in SHARED] if unit else [0] * len(SHARED)), cached
    print(f"; blocks of {report['block']}, of shared prefixes reused {cached}", end="")


def test_after_preemption_and_eviction_and_with_seeds(work, hybrids):
    """So few pages that sequences give way, and that what is cached goes."""
    long = [ids(500 + i, 600 + 5 * i) for i in range(8)]
    seeds = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    short = [ids(600 + i, 30 + 9 * i) for i in range(8)]
    rounds = [
        {"prompts": long[:1], "tokens": 8},
        {"prompts": long, "tokens": 64},
        {"prompts": long[:1], "tokens": 8},
        {"prompts": short, "tokens": 24, "sampling": seeds},
        *({"prompts": [ids_], "tokens": 24, "sampling": {**seeds, "seed": 11 + i}, "fresh": True}
          for i, ids_ in enumerate(short)),
    ]  # fmt: skip
    options = {"num_gpu_blocks_override": 20, "prefix_match_unit": 64}
    report = report_of(work, hybrids, "rotated.few", options, rounds)
    assert report["preemptions"] > 0 and report["block"] < 664
    assert_own(report["rounds"][:3])
    together, *alone = report["rounds"][3:]
    assert together["tokens"] == [one["tokens"][0] for one in alone]
    assert len({tuple(tokens) for tokens in together["tokens"]}) == len(short)
    print(f"; {report['preemptions']:.0f} preemptions", end="")


def test_planted_faults_change_tokens(work, hybrids):
    several = [ids(700 + i, 50 + i) for i in range(4)]
    over = [ids(800, 700)]  # goes on in a second block
    kept = ids(900, 130)
    rounds = [
        {"prompts": several, "tokens": 24, "fault": "a_state_of_another_request"},
        {"prompts": over, "tokens": 24, "fresh": True, "fault": "no_copies_of_states"},
        # a prefix is reused, whose state belongs to some tokens later
        {"prompts": [kept], "tokens": 24, "fresh": True, "fault": "checkpoints_that_go_on"},
        {"prompts": [kept + ids(901, 30)], "tokens": 24, "fault": "checkpoints_that_go_on"},
        # and the same without a fault
        {"prompts": several, "tokens": 24, "fresh": True},
        {"prompts": over, "tokens": 24, "fresh": True},
        {"prompts": [kept], "tokens": 24, "fresh": True},
        {"prompts": [kept + ids(901, 30)], "tokens": 24},
    ]
    report = report_of(work, hybrids, "rotated.faults", {"prefix_match_unit": 64}, rounds)
    found = report["rounds"]
    assert report["block"] < 700
    assert all(one["tokens"] != one["own"] for one in (found[0], found[1], found[3]))
    assert found[3]["cached"] == found[7]["cached"] == [128]
    assert_own([found[2], *found[4:]])


def test_the_server_gives_the_tokens_of_generate(work, hybrids):
    model, prompt = hybrids / "rotated-bin", ids(1000, 90)
    plan = [{"prompts": [prompt], "tokens": 24}]
    own = report_of(work, hybrids, "rotated.server", {}, plan)["rounds"][0]["own"][0]
    with claims_serving.server(work, model) as (client, _):
        (served,) = client.models.list().data
        assert served.id == "rotated-bin"
        extra = {"ignore_eos": True, "return_token_ids": True}
        ask = {"model": served.id, "prompt": prompt, "max_tokens": 24, "temperature": 0}
        for _ in range(2):  # the second from the prefix cache
            answer = client.completions.create(extra_body=extra, **ask).choices[0]
            assert answer.token_ids == own
        picture = {"type": "image_url", "image_url": {"url": PICTURE}}
        content = [{"type": "text", "text": "What is this?"}, picture]
        message = {"role": "user", "content": content}
        with pytest.raises(openai.BadRequestError, match="not a multimodal model"):
            client.chat.completions.create(model=served.id, messages=[message])


PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA"
    "WjR9awAAAABJRU5ErkJggg=="
)


def test_drafts_are_refused_before_vllm_starts(hybrids):
    words = ["vllm", str(hybrids / "rotated-bin"), "--speculative-config", "{}"]
    command = [sys.executable, "-m", "bitnet_ops", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    assert done.returncode == 1 and "expected no speculative decoding" in done.stderr
