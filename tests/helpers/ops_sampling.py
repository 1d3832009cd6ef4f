"""Specs of the ops that choose tokens: NumPy in float64, with full sorts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bounds import EXP_ERROR, TINY, U
from op_changes import F32, F64, I32, add_dim, narrow, to, value
from op_spec import Call, Rejections, spec
from op_values import Arguments, Built, strided, transposed

Edits = tuple[Tensor | None, Tensor | None, Tensor | None]


def _edited(
    logits: Tensor, starts: Tensor | None, ids: Tensor | None, edits: Tensor | None
) -> Tensor:
    """With bias, repetition and subtracted, each step rounded to float32."""
    logits = logits.clone()
    if starts is None or ids is None or edits is None:
        return logits
    for row in range(len(logits)):
        for e in range(int(starts[row]), int(starts[row + 1])):
            bias, repetition, subtracted = edits[e]
            x = logits[row, ids[e]] + bias
            logits[row, ids[e]] = (x / repetition if x > 0 else x * repetition) - subtracted
    return logits


def _has_distribution(row: Tensor) -> bool:
    return not bool(row.isnan().any()) and bool(row.max().isfinite())


def _kept(
    x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """ids in the order of the draw, and their probabilities, which need not sum to 1."""
    descending = np.argsort(-x, kind="stable")  # of equals the lower id first
    thinned = 0 < top_k < len(x)
    if thinned:
        descending = descending[:top_k]
    with np.errstate(under="ignore"):
        p = np.exp((x[descending] - x.max()) / temperature)
    p /= p.sum()
    kept = (np.cumsum(p) - p < top_p) & (p >= min_p * p.max())
    ids, p = descending[kept], p[kept]
    order = np.arange(len(ids)) if thinned else np.argsort(ids)
    return ids[order], p[order]


def gumbel(uniform: float, vocab: int) -> np.ndarray:
    """The noise of every id, as the docstring of ops.sample_tokens defines it."""
    key = (int(uniform * 2**53) + 0x9E3779B97F4A7C15) % 2**64
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
    key ^= key >> 31
    h = np.arange(vocab, dtype=np.uint64) ^ np.uint64(key % 2**32)
    for shift, added, factor in ((17, 0, 0xED5AD4BB), (11, key >> 32, 1), (0, 0, 0xAC4C1B51)):
        mixed = h ^ h >> np.uint64(shift) if shift else h
        h = (mixed + np.uint64(added)) % 2**32 * np.uint64(factor) % 2**32
    h = (h ^ h >> np.uint64(15)) * np.uint64(0x31848BAB) % 2**32
    signed = (h ^ h >> np.uint64(14)).astype(np.uint32).view(np.int32).astype(np.float64)
    low = signed < 0
    tail = (np.where(low, -1 - signed, signed) + 0.5) / 2**32
    return np.asarray(-np.log(np.where(low, -np.log(tail), -np.log1p(-tail))))


def noisy(x: np.ndarray, temperature: float, uniform: float) -> np.ndarray:
    """Logits with the noise of a draw without filters."""
    scale = np.float64(np.float32(min(max(temperature, 2.0**-100), 2.0**96)))
    return np.asarray(scale * gumbel(uniform, len(x)) + x)


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    edit_starts: Tensor | None = None,
    edit_ids: Tensor | None = None,
    edits: Tensor | None = None,
) -> Tensor:
    """float32 [R, V] -> int64 [R]."""
    tokens = []
    for r, row in enumerate(_edited(logits, edit_starts, edit_ids, edits)):
        if not _has_distribution(row):
            tokens.append(-1)
            continue
        x = row.double().numpy()
        if temperature[r] == 0:
            tokens.append(int(np.argmax(x)))
            continue
        options = float(temperature[r]), int(top_k[r]), float(top_p[r]), float(min_p[r])
        if not 0 < options[1] < len(x) and options[2:] == (1, 0):
            tokens.append(int(np.argmax(noisy(x, options[0], float(uniforms[r])))))
            continue
        ids, p = _kept(x, *options)
        reached = np.cumsum(p)
        at = int(np.searchsorted(reached, float(uniforms[r]) * reached[-1], side="right"))
        tokens.append(int(ids[min(at, len(ids) - 1)]))
    return torch.tensor(tokens, dtype=torch.int64)


def token_probabilities(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    edit_starts: Tensor | None = None,
    edit_ids: Tensor | None = None,
    edits: Tensor | None = None,
) -> Tensor:
    """float32 [R, V] -> the same."""
    result = torch.zeros(logits.shape, dtype=torch.float64)
    for r, row in enumerate(_edited(logits, edit_starts, edit_ids, edits)):
        if not _has_distribution(row):
            result[r] = torch.nan
            continue
        x = row.double().numpy()
        if temperature[r] == 0:
            result[r, int(np.argmax(x))] = 1.0
            continue
        options = float(temperature[r]), int(top_k[r]), float(top_p[r]), float(min_p[r])
        ids, p = _kept(x, *options)
        result[r, torch.from_numpy(ids.copy())] = torch.from_numpy(p / p.sum())
    return result.to(torch.float32)


def _probability_bound(args: Arguments, expected: Tensor) -> Tensor:
    logits, temperature = args[0].double(), args[1].clamp(min=1e-30)
    lowest = logits.masked_fill(logits == -torch.inf, torch.inf).amin(-1)
    exponent = ((logits.amax(-1) - lowest) / temperature).clamp(max=87.0)
    # A difference, 1 / temperature and their product are rounded, then exp; of the token and of the
    # sum; then 1 / sum and a product.  Where exp is below e^-87 the result is 0.
    relative = 2 * (3 * U * exponent + EXP_ERROR) + 2 * U
    return expected.double() * relative[:, None] + 2 * TINY


def options(rows: int, *choices: tuple[float, int, float, float]) -> tuple[Tensor, ...]:
    """temperature, top_k, top_p, min_p: the choices in turn."""
    taken = [choices[r % len(choices)] for r in range(rows)]
    columns = list(zip(*taken, strict=True)) or [(), (), (), ()]
    dtypes = torch.float64, torch.int64, torch.float64, torch.float64
    return tuple(torch.tensor(c, dtype=d) for c, d in zip(columns, dtypes, strict=True))


EVERY_FILTER = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 40, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (2.0, 30, 0.8, 0.02),
    (0.9, 0, 0.95, 0.01),
    (1.0, 1, 1.0, 0.0),
)


def uniforms_of(g: torch.Generator, rows: int) -> Tensor:
    return torch.rand(rows, generator=g, dtype=torch.float64)


def some_edits(g: torch.Generator, rows: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row r has r % 3 * 2 of them."""
    counts = [min(r % 3 * 2, vocab) for r in range(rows)]
    ids = [torch.randperm(vocab, generator=g)[:n] for n in counts]
    edits = torch.rand(sum(counts), 3, generator=g) * 2 + 0.1
    return torch.tensor([0, *np.cumsum(counts)]), torch.cat(ids), edits


def _arguments(g: torch.Generator, logits: Tensor, draw: bool, *filters: object) -> Arguments:
    rows = len(logits)
    chosen = options(rows, *(filters or EVERY_FILTER))  # type: ignore[arg-type]
    return (logits, *chosen, *([uniforms_of(g, rows)] if draw else []))


def _logits(g: torch.Generator, rows: int, vocab: int) -> Tensor:
    return torch.randn(rows, vocab, generator=g) * 3


def _samples(draw: bool) -> Built:
    yield "every_filter", lambda g: _arguments(g, _logits(g, 16, 300), draw)
    yield "edits", lambda g: (
        *_arguments(g, _logits(g, 9, 50), draw), *some_edits(g, 9, 50),
    )  # fmt: skip
    yield "no_edits_made", lambda g: (
        *_arguments(g, _logits(g, 2, 50), draw),
        torch.zeros(3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3),
    )  # fmt: skip
    yield "ties", lambda g: _arguments(g, _logits(g, 16, 40).round(), draw)
    yield "one_token", lambda g: _arguments(g, _logits(g, 8, 1), draw)
    yield "no_rows", lambda g: _arguments(g, _logits(g, 0, 40), draw)
    yield (
        "excluded",
        lambda g: _arguments(
            g, _logits(g, 8, 99).masked_fill(torch.rand(8, 99, generator=g) < 0.7, -torch.inf), draw
        ),
    )
    yield "strided", lambda g: _arguments(g, strided(_logits(g, 8, 40)), draw)
    yield "transposed", lambda g: _arguments(g, transposed(_logits(g, 8, 40)), draw)
    if not draw:
        return  # test_sample_ops.py has rows of NaN: a NaN is within no bound
    yield (
        "not_finite",
        lambda g: _arguments(
            g,
            _logits(g, 8, 40)
            .index_put((torch.tensor([1, 2]), torch.tensor([3, 39])), torch.tensor(torch.nan))
            .index_put((torch.tensor([4]), torch.tensor([0])), torch.tensor(torch.inf))
            .index_fill(0, torch.tensor([6, 7]), -torch.inf),
            draw,
        ),
    )


_OPTION_REJECTIONS: Rejections = [
    ({"logits": to("logits", F64)}, "logits", "of dtype float32, got float64"),
    ({"logits": lambda a: a["logits"][0]}, "logits", "with 2 dimensions"),
    ({"logits": lambda a: a["logits"][:, :0]}, "logits", "of 1 to 2147483647 tokens, got 0"),
    ({"temperature": to("temperature", F32)}, "temperature", "of dtype float64, got float32"),
    ({"temperature": narrow("temperature")}, "temperature", "of shape [3], got [2]"),
    ({"temperature": lambda a: -a["temperature"]}, "temperature", "finite and at least 0, got -"),
    ({"temperature": lambda a: a["temperature"] / 0}, "temperature", "finite and at least 0"),
    ({"top_k": to("top_k", I32)}, "top_k", "of dtype int64, got int32"),
    ({"top_k": add_dim("top_k")}, "top_k", "of shape [3], got [1, 3]"),
    ({"top_k": lambda a: a["top_k"] - 9}, "top_k", "at least 0, got -"),
    ({"top_p": to("top_p", F32)}, "top_p", "of dtype float64, got float32"),
    ({"top_p": lambda a: a["top_p"] * 0}, "top_p", "above 0 and at most 1, got 0.0"),
    ({"top_p": lambda a: a["top_p"] + 1}, "top_p", "above 0 and at most 1, got "),
    ({"min_p": to("min_p", F32)}, "min_p", "of dtype float64, got float32"),
    ({"min_p": lambda a: a["min_p"] + 1.1}, "min_p", "from 0 to 1, got "),
    ({"min_p": lambda a: a["min_p"] * torch.nan}, "min_p", "from 0 to 1, got "),
]  # fmt: skip
_UNIFORM_REJECTIONS: Rejections = [
    ({"uniforms": to("uniforms", F32)}, "uniforms", "of dtype float64, got float32"),
    ({"uniforms": narrow("uniforms")}, "uniforms", "of shape [3], got [2]"),
    ({"uniforms": lambda a: a["uniforms"] + 1}, "uniforms", "from 0 to below 1, got "),
]  # fmt: skip
_EDIT_REJECTIONS: Rejections = [
    ({"edit_starts": value(None)}, "edit_starts", "together with the other two"),
    ({"edit_ids": value(None)}, "edit_ids", "together with the other two"),
    ({"edits": value(None)}, "edits", "together with the other two"),
    ({"edit_starts": to("edit_starts", I32)}, "edit_starts", "of dtype int64, got int32"),
    ({"edit_starts": narrow("edit_starts")}, "edit_starts", "of shape [4], got [3]"),
    ({"edit_starts": lambda a: a["edit_starts"] + 1}, "edit_starts", "to begin with 0, got 1"),
    ({"edit_starts": value(torch.tensor([0, 4, 2, 6]))}, "edit_starts", "ascending, got 2 after 4"),
    ({"edit_starts": value(torch.tensor([0, 0, 2, 5]))}, "edit_starts", "to end with the 6"),
    ({"edit_ids": to("edit_ids", I32)}, "edit_ids", "of dtype int64, got int32"),
    ({"edit_ids": add_dim("edit_ids")}, "edit_ids", "with 1 dimensions"),
    ({"edit_ids": lambda a: a["edit_ids"] + 40}, "edit_ids", "from 0 to 39, got "),
    ({"edit_ids": lambda a: a["edit_ids"] - 40}, "edit_ids", "from 0 to 39, got -"),
    ({"edits": to("edits", F64)}, "edits", "of dtype float32, got float64"),
    ({"edits": narrow("edits")}, "edits", "of shape [6, 3], got [6, 2]"),
    ({"edits": narrow("edits", 0)}, "edits", "of shape [6, 3], got [5, 3]"),
    ({"edits": lambda a: a["edits"] / 0}, "edits", "finite, with a repetition above 0, got [inf"),
    ({"edits": lambda a: -a["edits"]}, "edits", "finite, with a repetition above 0"),
]  # fmt: skip


def _named(g: torch.Generator, draw: bool) -> dict[str, Tensor]:
    names = ["logits", "temperature", "top_k", "top_p", "min_p"] + ["uniforms"] * draw
    filters = (0.9, 20, 0.9, 0.01), (1.0, 0, 0.5, 0.1), (0.7, 3, 1.0, 0.0)
    args = _arguments(g, _logits(g, 3, 40), draw, *filters)
    edits = zip(("edit_starts", "edit_ids", "edits"), some_edits(g, 3, 40), strict=True)
    return {**dict(zip(names, args, strict=True)), **dict(edits)}


LARGE = 20_011  # divides by nothing, and more than is listed without a bracket

spec(
    sample_tokens,
    samples=lambda: _samples(True),
    large=[lambda g: (*_arguments(g, _logits(g, 17, LARGE), True), *some_edits(g, 17, LARGE))],
    calls={
        "": Call(
            lambda g: _named(g, True), _OPTION_REJECTIONS + _UNIFORM_REJECTIONS + _EDIT_REJECTIONS
        ),
    },
    rows={
        f"filter {i}": lambda g, dtype, i=i: lambda x: _arguments(
            torch.Generator().manual_seed(i), x, False, EVERY_FILTER[i]
        ) + (torch.full((len(x),), 0.37, dtype=torch.float64),)
        for i in range(len(EVERY_FILTER))
    },
    row_dtypes=(torch.float32,),
    empty={"": lambda: _arguments(torch.Generator(), torch.empty(0, 2**31 - 1), True)},
)  # fmt: skip
spec(
    token_probabilities,
    samples=lambda: _samples(False),
    large=[lambda g: (*_arguments(g, _logits(g, 17, LARGE), False), *some_edits(g, 17, LARGE))],
    calls={"": Call(lambda g: _named(g, False), _OPTION_REJECTIONS + _EDIT_REJECTIONS)},
    bound=_probability_bound,
    rows={
        f"filter {i}": lambda g, dtype, i=i: lambda x: _arguments(g, x, False, EVERY_FILTER[i])
        for i in range(len(EVERY_FILTER))
    },
    row_dtypes=(torch.float32,),
    empty={"": lambda: _arguments(torch.Generator(), torch.empty(0, 2**31 - 1), False)},
)

# top_logprobs -------------------------------------------------------------------------------------


def top_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [R, V], int64 [R] -> float32 [R], int64 [R, top], float32 [R, top]."""
    rows = len(logits)
    of_tokens = torch.full((rows,), torch.nan)
    ids = torch.full((rows, top), -1, dtype=torch.int64)
    of_ids = torch.full((rows, top), torch.nan)
    for r, row in enumerate(logits):
        if not _has_distribution(row):
            continue
        logprobs = torch.log_softmax(row.double(), -1)
        if tokens[r] >= 0:
            of_tokens[r] = logprobs[tokens[r]]
        ids[r] = torch.from_numpy(np.argsort(-row.numpy(), kind="stable")[:top].copy())
        of_ids[r] = logprobs[ids[r]]
    return of_tokens, ids, of_ids


def _logprob_bound(args: Arguments, expected: Tensor) -> Tensor:
    logits = args[0].double()
    # The logarithm of a sum whose terms have the error of a difference and of exp; then a rounding.
    relative = (logits.amax(-1) - logits.amin(-1)).clamp(max=87.0) * U + EXP_ERROR
    return relative.reshape(-1, *[1] * (expected.dim() - 1)) + expected.double().abs() * U


def _top_logprobs_samples() -> Built:
    def chosen(g: torch.Generator, rows: int, vocab: int) -> Tensor:
        return torch.randint(-1, vocab, (rows,), generator=g)

    yield "ten", lambda g: (_logits(g, 7, 300), chosen(g, 7, 300), 10)
    yield "none", lambda g: (_logits(g, 7, 300), chosen(g, 7, 300), 0)
    yield "all", lambda g: (_logits(g, 3, 17), chosen(g, 3, 17), 17)
    yield "ties", lambda g: (_logits(g, 7, 50).round(), chosen(g, 7, 50), 9)
    # beside which the logarithm of the sum is nothing
    yield "huge", lambda g: (_logits(g, 7, 50).round() * 1e17, chosen(g, 7, 50), 9)
    yield "no_rows", lambda g: (_logits(g, 0, 50), chosen(g, 0, 50), 9)
    yield "strided", lambda g: (strided(_logits(g, 3, 50)), strided(chosen(g, 3, 50)), 4)


spec(
    top_logprobs,
    samples=_top_logprobs_samples,
    large=[lambda g: (_logits(g, 17, LARGE), torch.randint(0, LARGE, (17,), generator=g), 20)],
    calls={
        "": Call(
            lambda g: {"logits": _logits(g, 3, 40), "tokens": torch.tensor([0, 39, -1]), "top": 5},
            [
                ({"logits": to("logits", F64)}, "logits", "of dtype float32, got float64"),
                ({"logits": lambda a: a["logits"][0]}, "logits", "with 2 dimensions"),
                ({"tokens": to("tokens", I32)}, "tokens", "of dtype int64, got int32"),
                ({"tokens": narrow("tokens")}, "tokens", "of shape [3], got [2]"),
                ({"tokens": lambda a: a["tokens"] + 1}, "tokens", "to 39, got 40 for row 1"),
                ({"tokens": lambda a: a["tokens"] - 1}, "tokens", "from -1 (none) to 39, got -2"),
                ({"top": value(41)}, "top", "from 0 to 40, got 41"),
                ({"top": value(-1)}, "top", "from 0 to 40, got -1"),
            ],
        ),
    },
    bound=_logprob_bound,
    rows={
        "": lambda g, dtype: lambda x: (x, torch.full((len(x),), 3), 9),
        "none": lambda g, dtype: lambda x: (x, torch.full((len(x),), 3), 0),
    },
    row_dtypes=(torch.float32,),
    empty={"": lambda: (torch.empty(0, 2**31 - 1), torch.empty(0, dtype=torch.int64), 2**31 - 1)},
)  # fmt: skip
