"""Whether what an engine served is right: its tokens, and that our code made them.

In bfloat16 two right programs differ by some per cent of the largest logit (about 10 here): a token
may differ only where the reference's own lead is below `NEAR_TIE`. In float32 none may: the prompts
were chosen for their leads (the smallest is 0.04).
"""

from __future__ import annotations

NEAR_TIE = {"float32": 0.0, "bfloat16": 0.3}


def assert_tokens(report, cases, dtype):
    """Every token equal up to the first difference, which must be a near-tie of the reference."""
    same, total = 0, 0
    for case, (prompt_length, tokens) in zip(cases, report["answers"], strict=True):
        assert prompt_length == len(case["prompt_ids"]), case["prompt"]
        pairs = enumerate(zip(tokens, case["tokens"], strict=True))
        at = next((i for i, (a, b) in pairs if a != b), len(tokens))
        assert at == len(tokens) or case["leads"][at] < NEAR_TIE[dtype], (case["prompt"], at)
        same, total = same + at, total + len(tokens)
    smallest = min(min(case["leads"]) for case in cases)
    print(f"; {same} of {total} tokens equal, smallest lead {smallest}", end="")
    assert 2 * same >= total


def assert_calls(report, counted, a_forward, ranks=1):
    """Ours ran in as many other processes as there are ranks, once a forward and linear."""
    calls = report["calls"]
    elsewhere = {pid: n for pid, n in calls[counted].items() if pid != str(report["own_pid"])}
    print(f"; {counted}() {list(elsewhere.values())}: {', '.join(report['kinds'])}")
    assert len(elsewhere) == ranks and elsewhere == calls[counted], calls
    forwards = len(report["answers"][0][1])
    for n in elsewhere.values():
        assert n % a_forward == 0 and n >= forwards * a_forward, (n, a_forward, forwards)
    (other,) = {"apply", "step"} - {counted}
    assert not calls[other]
