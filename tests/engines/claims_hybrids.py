"""The real SGLang serves hybrids: its tokens are our own engine's, its slots hold the states.

Chunks, prefixes, conversations, eviction, retraction and overlapping schedules; faults of its
book-keeping show; two ranks; over HTTP, from every form of a model.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

import faults
import pytest
from claims_serving import script, server
from environment import child_environment

from engines import chosen

ENGINE = chosen()
pytestmark = [pytest.mark.hybrids, pytest.mark.of("sglang")]

INSIDE = {"mamba_radix_cache_strategy": "extra_buffer"}  # states inside of prompts
SMALL = {
    "max_total_tokens": 640,
    "max_mamba_cache_size": 60,
    "max_running_requests": 12,
    "schedule_conservativeness": 0.05,
}  # requests are let in that will not all fit
ROOMY = {"max_total_tokens": 8192, "max_mamba_cache_size": 96, "max_running_requests": 16}
USUAL = ("batches", "prefixes", "turns", "sampled")
# The kind of hybrid, options of the engine, what is tried.
RUNS = {
    "chunks of 16, states at ends": ("plain", {**ROOMY, "chunked_prefill_size": 16}, USUAL),
    "chunks of 64": ("plain-tied", {**ROOMY, **INSIDE, "chunked_prefill_size": 64}, USUAL),
    "chunks of 512, overlapping": (
        "rotated",
        {**ROOMY, **INSIDE, "chunked_prefill_size": 512, "disable_overlap_schedule": False},
        USUAL,
    ),
    "few tokens and slots": (
        "square",
        {**SMALL, **INSIDE, "chunked_prefill_size": 128},
        ("turns", "eviction", "retraction"),
    ),
    "faults": ("rotated", {**ROOMY, **INSIDE}, ("faults",)),
}  # fmt: skip
# whether this SGLang can be brought to ask for states inside of prompts
STATES_INSIDE = ENGINE.name == "sglang" and (
    importlib.metadata.version("sglang") not in ("0.5.20", "0.5.21")
)


@pytest.fixture(scope="session")
def hybrid(work):
    """case -> (the converted folder, what SGLang's launcher makes of it)"""
    made = {}

    def make(case):
        if case not in made:
            script(work, "checkpoints.py", f"hybrid-{case}", "hybrid", work / "hybrids", case)
            folder, converted = work / f"serving-{case}", work / "hybrids" / f"{case}-bin"
            script(work, "checkpoints.py", folder.name, "folder", converted, folder, "stored")
            made[case] = converted, folder
        return made[case]

    return make


def serve(work, hybrid, name, case, options, scenarios):
    """The report of serve_hybrid.py."""
    converted, folder = hybrid(case)
    label = name.replace(" ", "-").replace(",", "")
    result = work / f"hybrid-{label}.json"
    result.unlink(missing_ok=True)
    env = {**os.environ, **ENGINE.environment(1)}
    env.pop("TORCHDYNAMO_DISABLE", None)
    words = converted, folder, result, work / f"hybrid-{label}", json.dumps(options), *scenarios
    seconds = script(work, "serve_hybrid.py", f"hybrid-{label}", *words, env=env)
    report = json.loads(result.read_text())
    print(f"\n  {name}: {seconds:.0f} s; {report['equal']} of {report['total']} tokens equal")
    print(f"  {json.dumps(report['seen'])}")
    return report


@pytest.mark.parametrize("name", RUNS)
def test_tokens_are_our_own_engines(work, hybrid, name):
    case, options, scenarios = RUNS[name]
    inside = "mamba_radix_cache_strategy" in options
    if inside and not STATES_INSIDE:
        pytest.skip("this SGLang keeps no states inside of prompts on a CPU")
    report = serve(work, hybrid, name, case, options, scenarios)
    assert report["equal"] == report["total"]
    elsewhere = [pid for pid in report["steps"] if pid != str(report["own_pid"])]
    assert len(elsewhere) == 1  # one op a forward, in SGLang's scheduler
    seen = report["seen"]
    if "batches" in seen:
        assert report["total"] >= 384 and seen["batches"]["cached again"] > 0
    if "prefixes" in seen and inside:  # the third begins where the second has parted
        found = {int(shared): cached[2] for shared, cached in seen["prefixes"].items()}
        assert found == {1: 0, 63: 0, 64: 64, 65: 64, 300: 256}
    if "turns" in seen:
        assert sum(map(sum, seen["turns"][1:])) > 0
    if "sampled" in seen:
        assert seen["sampled"]["largest difference"] < 1e-4
    if "eviction" in seen:
        assert seen["eviction"]["cached after others"] == [0, 0]
        assert seen["retraction"]["retractions"] > 0
    if "faults" in seen:
        assert {f for f, n in seen["faults"].items() if n} == {*faults.HARMFUL}


def test_two_ranks_run_the_whole_model_each(work, hybrid):
    """Data parallel, two processes; a request goes to one of them."""
    options = {**ROOMY, **INSIDE} if STATES_INSIDE else ROOMY
    report = serve(work, hybrid, "two ranks", "plain", {**options, "dp_size": 2}, ("batches",))
    assert report["equal"] == report["total"] >= 384
    elsewhere = {pid: n for pid, n in report["steps"].items() if pid != str(report["own_pid"])}
    assert len(elsewhere) == 2 and min(elsewhere.values()) > 10


@pytest.mark.parametrize("words", [["--", "--tp", "2"], ["--per-layer", "--", "--tp", "2"]])
def test_tensor_parallel_is_refused_with_the_way_out(work, hybrid, words):
    model = hybrid("plain")[0] if "--per-layer" not in words else work / "hybrids" / "plain-hf"
    command = [sys.executable, "-m", "bitnet_ops", "sglang", str(model), "--print", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    assert done.returncode == 1 and "--dp 2" in done.stderr
    print(f"\n  {done.stderr.strip().splitlines()[-1]}")


@pytest.mark.parametrize("form", ["plain-hf", "rotated-hf", "rotated-gguf/PQ2_0.gguf", "plain-bin"])
def test_every_form_of_a_model_reaches_sglang(work, hybrid, form):
    """Hugging Face's safetensors, an MLX package, GGUF, a converted folder."""
    for case in ("plain", "rotated"):
        hybrid(case)
    model = work / "hybrids" / form
    env = child_environment(XDG_CACHE_HOME=str(work / "cache"))
    command = [sys.executable, "-m", "bitnet_ops", "sglang", str(model), "--print"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert "--max-mamba-cache-size" in words and ("extra_buffer" in words) == STATES_INSIDE


def post(port, path, body):
    """(status, JSON) of the server's answer."""
    url, data = f"http://127.0.0.1:{port}{path}", json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_the_server_gives_the_same_and_refuses_pictures(work, hybrid):
    """Of a GGUF file, which is converted on the way."""
    converted = hybrid("rotated")[0]
    model = work / "hybrids" / "rotated-gguf/PQ2_0.gguf"
    prompts = [[3 + (i * j) % 250 for i in range(1, 40 * j)] for j in (1, 2, 3)]
    truth = work / "http.json"
    words = "answers", converted, truth, json.dumps(prompts), 24
    script(work, "checkpoints.py", "http", *words)
    expected = json.loads(truth.read_text())
    with server(work, model) as (client, port):
        sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        for _ in range(2):  # the second time behind what is kept
            body = {"input_ids": prompts, "sampling_params": sampling}
            status, answers = post(port, "/generate", body)
            assert status == 200 and [a["output_ids"] for a in answers] == expected
        (served,) = client.models.list().data
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        message = {"role": "user", "content": [{"type": "text", "text": "What?"}, picture]}
        status, answer = post(
            port, "/v1/chat/completions", {"model": served.id, "messages": [message]}
        )
        print(f"\n  {status} {answer}")
        assert status == 400 and "image" in json.dumps(answer)
        body = {"text": "What?", "image_data": "data:image/png;base64,AA=="}
        status, answer = post(port, "/generate", body)
        print(f"  {status} {answer}")
        assert status == 400 and "bitnet-ops serve" in json.dumps(answer)
