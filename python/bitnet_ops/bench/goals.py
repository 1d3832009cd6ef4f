"""The goals for speed, as data: what must be, what is hoped for, where it applies, how measured.

Every goal is a ratio to a limit taken in the same process, or to another measurement of the same
run; none is a number of tokens a second, which would be about a machine. `metric` names a function
of measure_goals.py and `arguments` are its own. It must not know tensors, timing or verdicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# What timing the parts of a step one by one may err by; below it they took longer than the step.
LEAST_OVERHEAD = -0.02
READ, PEAK, TIMES = "of reading", "of int8 peak", "x"
AVX512, VBMI, AVX_VNNI, AVX2, AMX = "avx512_vnni", "avx512_vbmi", "avx_vnni", "avx2", "amx_int8"


@dataclass(frozen=True)
class Goal:
    """One row of the table.

    must, ambitious: the bar and what is hoped for (None: nothing more), in `unit`; `at_most`:
        smaller is better.
    isa: kernels that it speaks of ("" = those that the CPU chooses); where they cannot run it is
        not a goal. `feature`: a CPU feature that it needs on top.
    unless: a CPU feature whose machines have a goal of their own in its place.
    threads: where it binds: 1, or 0 for all CPUs; elsewhere it is measured and only shown.
    """

    id: str
    title: str
    must: float
    ambitious: float | None
    unit: str
    metric: str
    arguments: tuple[tuple[str, Any], ...] = ()
    isa: str = ""
    feature: str = ""
    unless: str = ""
    at_most: bool = False
    threads: tuple[int, ...] = (0,)

    @property
    def most(self) -> float:
        """What no honest measurement can exceed: a share of a limit, with room for its error.

        Plain reading is not the fastest form of reading, so a kernel may well be above it.
        """
        if self.at_most or not self.unit.startswith("of "):
            return float("inf")
        return 1.4 if self.unit == "of plain reading" else 1.1

    @property
    def least(self) -> float:
        """What no honest measurement can be below: parts of a step are no more than the step."""
        return LEAST_OVERHEAD if self.unit == "of a step" else 0.0

    def keywords(self) -> dict[str, Any]:
        return dict(self.arguments)


def _goal(
    id: str, title: str, must: float, ambitious: float | None, unit: str, metric: str, **rest: Any
) -> Goal:
    fields = {n: rest.pop(n) for n in list(rest) if n in Goal.__dataclass_fields__}
    return Goal(id, title, must, ambitious, unit, metric, tuple(rest.items()), **fields)


def _cold(id: str, title: str, must: float, ambitious: float, weights: str, **rest: Any) -> Goal:
    return _goal(id, title, must, ambitious, READ, "gemv_cold", weights=weights, **rest)


ALL = (0,)
ANY = (1, 0)

PRODUCTS = (
    _cold("gemv-cold", "GEMV cold, 2bit, AVX512-VNNI", 0.90, 0.96, "2bit", isa=AVX512, unless=AMX),
    _cold(
        "gemv-cold-bin",
        "GEMV cold, canonical, AVX512-VNNI",
        0.88,
        0.94,
        "canonical",
        isa=AVX512,
        unless=AMX,
    ),
    _cold(
        "gemv-cold-base3",
        "GEMV cold, 1.6bit, VBMI",
        0.88,
        0.95,
        "1.6bit",
        isa=AVX512,
        feature=VBMI,
    ),
    _goal(
        "base3-gain",
        "GEMV cold, 1.6bit: speed of 2bit, VBMI",
        1.15,
        1.22,
        TIMES,
        "base3_gain",
        isa=AVX512,
        feature=VBMI,
    ),
    _cold("gemv-cold-avx-vnni", "GEMV cold, 2bit, AVX-VNNI", 0.88, 0.95, "2bit", isa=AVX_VNNI),
    _cold("gemv-cold-avx2", "GEMV cold, 2bit, AVX2", 0.82, 0.90, "2bit", isa=AVX2),
    _goal(
        "gemv-hot-l2",
        "GEMV in L2",
        0.85,
        0.96,
        PEAK,
        "gemv_hot",
        cache="L2",
        unless=AMX,
        threads=(1,),
    ),
    _goal("gemv-hot-l3", "GEMV in L3", 0.75, 0.85, PEAK, "gemv_hot", cache="L3", unless=AMX),
    _goal("gemm-hot-2", "GEMM hot, M = 2", 0.85, 0.93, PEAK, "gemm_hot", tokens=(2,), unless=AMX),
    _goal("gemm-hot-4", "GEMM hot, M = 4", 0.90, 0.96, PEAK, "gemm_hot", tokens=(4,), unless=AMX),
    _goal(
        "gemm-hot-16",
        "GEMM hot, M = 16, 32, 128, 512",
        0.92,
        0.98,
        PEAK,
        "gemm_hot",
        tokens=(16, 32, 128, 512),
        unless=AMX,
    ),
    _goal(
        "gemm-int8-32",
        "GEMM hot, M = 32, 128: speed of torch int8",
        1.0,
        1.1,
        TIMES,
        "against_int8",
        tokens=(32, 128),
        unless=AMX,
    ),
    _goal(
        "gemm-int8-4",
        "GEMM hot, M = 4: speed of torch int8",
        1.3,
        1.5,
        TIMES,
        "against_int8",
        tokens=(4,),
        unless=AMX,
    ),
    _goal(
        "cost-4",
        "GEMM cold, M = 4: cost in M = 1",
        1.35,
        1.2,
        TIMES,
        "cold_cost",
        tokens=4,
        unless=AMX,
        at_most=True,
    ),
    _goal(
        "no-cliff",
        "time(M) / time(M'), worst of all M < M' <= 64",
        1.1,
        None,
        TIMES,
        "cliff",
        most=64,
        at_most=True,
        threads=ANY,
    ),
)

HEAD_AND_ATTENTION = (
    _goal("head-int8", "LM head, int8", 0.90, 0.96, READ, "head", head="int8"),
    _goal("head-int4", "LM head, int4", 0.90, 0.96, READ, "head", head="int4"),
    _goal(
        "attention-bf16",
        "decode attention, bf16 cache, context 2048, 8192",
        0.70,
        0.88,
        READ,
        "attention",
        cache="bfloat16",
        contexts=(2048, 8192),
    ),
    _goal(
        "attention-int8",
        "decode attention, int8 cache, context 2048, 8192",
        0.60,
        0.85,
        READ,
        "attention",
        cache="int8",
        contexts=(2048, 8192),
    ),
    _goal(
        "attention-sdpa",
        "decode attention: speed of torch SDPA, worst of context 128 ... 8192",
        1.0,
        None,
        TIMES,
        "against_sdpa",
        contexts=(128, 512, 2048, 8192),
        threads=ANY,
    ),
)

WHOLE_STEP = (
    _goal(
        "step",
        "decode step, 2bit + int8 head, context <= 128",
        0.80,
        0.91,
        READ,
        "step",
        weights="2bit",
        head="int8",
    ),
    _goal(
        "step-small",
        "decode step, 1.6bit + int4 head, context <= 128",
        0.80,
        0.90,
        READ,
        "step",
        weights="1.6bit",
        head="int4",
        isa=AVX512,
        feature=VBMI,
    ),
    _goal(
        "overhead",
        "share of a step outside its kernels",
        0.05,
        None,
        "of a step",
        "overhead",
        at_most=True,
    ),
    _goal(
        "regions",
        "parallel regions a layer",
        6.0,
        4.0,
        "regions",
        "regions",
        at_most=True,
    ),
    _goal("prefill", "prefill of 512 tokens", 0.75, None, PEAK, "prefill", tokens=512, unless=AMX),
)


def _amx(
    id: str, title: str, must: float, ambitious: float, unit: str, metric: str, **rest: Any
) -> Goal:
    return _goal(f"amx-{id}", f"AMX machine: {title}", must, ambitious, unit, metric, **rest)


def _amx_hot(tokens: tuple[int, ...], must: float, ambitious: float, threads: int) -> Goal:
    names = ", ".join(map(str, tokens))
    return _amx(
        f"hot-{tokens[0]}-{'2t' if threads == 0 else '1t'}",
        f"GEMM hot, M = {names}",
        must,
        ambitious,
        "of AMX peak",
        "gemm_hot",
        tokens=tokens,
        isa=AMX,
        threads=(threads,),
    )


_AMX_HOT = (
    ((4,), 0.15, 0.20),
    ((8,), 0.28, 0.38),
    ((16,), 0.48, 0.65),
    ((32,), 0.63, 0.78),
    ((64, 128), 0.60, 0.75),
)

AMX_MACHINE = (
    _amx(
        "gemv-cold-r0",
        "GEMV cold, 2bit",
        0.90,
        1.0,
        "of plain reading",
        "gemv_cold",
        weights="2bit",
        limit="plain",
        isa=AMX,
    ),
    _amx(
        "gemv-cold-r1",
        "GEMV cold, 2bit",
        0.75,
        0.85,
        "of prefetched reading",
        "gemv_cold",
        weights="2bit",
        isa=AMX,
    ),
    _amx(
        "gemv-cold-bin",
        "GEMV cold, canonical",
        0.86,
        0.95,
        "of plain reading",
        "gemv_cold",
        weights="canonical",
        limit="plain",
        isa=AMX,
    ),
    *(
        _amx(
            f"cost-{m}",
            f"GEMM cold, M = {m}: cost in M = 1",
            must,
            ambitious,
            TIMES,
            "cold_cost",
            tokens=m,
            at_most=True,
            isa=AMX,
        )
        for m, must, ambitious in ((4, 1.4, 1.1), (8, 1.6, 1.2))
    ),
    *(
        _amx(
            f"vnni-hot-{m}",
            f"VNNI GEMM hot, M = {m}",
            must,
            ambitious,
            "of VNNI peak",
            "gemm_hot",
            tokens=(m,),
            isa=AVX512,
            feature=AMX,
        )
        # at M = 1 the masks take 3 of 7 slots of the vector ports: 4/7 is the ceiling
        for m, must, ambitious in ((1, 0.37, 0.44), (2, 0.60, 0.68), (4, 0.72, 0.80))
    ),
    *(_amx_hot(tokens, must, ambitious, 1) for tokens, must, ambitious in _AMX_HOT),
    *(
        _amx_hot(tokens, round(must - 0.05, 2), round(ambitious - 0.05, 2), 0)
        for tokens, must, ambitious in _AMX_HOT[3:]
    ),
    _amx_hot((512,), 0.50, 0.72, 1),
    _amx(
        "cold-32",
        "GEMM cold, M = 32",
        0.48,
        0.80,
        "of plain reading",
        "gemm_cold_read",
        tokens=(32,),
        isa=AMX,
    ),
    *(
        _amx(
            f"cold-{m}",
            f"GEMM cold, M = {m}",
            must,
            ambitious,
            "of AMX peak",
            "gemm_cold_peak",
            tokens=(m,),
            isa=AMX,
        )
        for m, must, ambitious in ((64, 0.45, 0.60), (128, 0.52, 0.70))
    ),
    *(
        _amx(
            f"int8-{m}",
            f"GEMM hot, M = {m}: speed of torch int8",
            must,
            ambitious,
            TIMES,
            "against_int8",
            tokens=(m,),
            isa=AMX,
        )
        for m, must, ambitious in (
            (4, 4.0, 6.0),
            (16, 3.5, 5.0),
            (32, 3.0, 4.0),
            (128, 1.8, 2.5),
            (512, 1.3, 2.0),
        )
    ),
    _amx(
        "prefill",
        "prefill of 512 tokens",
        0.42,
        0.60,
        "of AMX peak",
        "prefill",
        tokens=512,
        isa=AMX,
    ),
    _amx(
        "decode-in-loop",
        "tile decode inside the AMX loop, data in L1",
        0.97,
        1.0,
        "of pure 2x2",
        "not_measured",
        isa=AMX,
    ),
)

GOALS: tuple[Goal, ...] = (*PRODUCTS, *HEAD_AND_ATTENTION, *WHOLE_STEP, *AMX_MACHINE)
