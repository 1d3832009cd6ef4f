"""`bitnet-ops inspect A --diff B`: what differs between two models, whatever their files are.

Config, names, shapes and values, tensor by tensor. Ternary matrices are compared code by code and
scale by scale; a dense matrix against a ternary one by its values, and if they differ as masters,
ternarised by absmean. It must not know kinds of files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitnet_ops import ops
from bitnet_ops.config import PRIVATE_BLOCK
from bitnet_ops.convert.errors import reject, said_by
from bitnet_ops.convert.inspect import Contents, Values, open_source
from bitnet_ops.convert.ternary import MASTERS
from bitnet_ops.errors import counted
from bitnet_ops.nn.packing import spread_scales
from bitnet_ops.nn.storage import GROUP_SIZES

_NOT_THERE = "(not there)"


@said_by("inspect")
def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> dict[str, Any]:
    """What differs between the models at `a` and `b`, as plain numbers and strings.

    Keys: a, b (path and kind), config (key -> [a, b], the converter's private block left out),
    only_a, only_b (names), tensors (a list of those that differ), same (how many do not), equal,
    draft (whether a and b have a draft head) and draft_compared.
    Of a ternary pair: codes_differing, a share, and scale_ratio_min and _max, those of b against
    those of a. Of a dense pair: max_difference, max_magnitude (of a) and values_differing, a share.
    """
    first, second = open_source(a), open_source(b)
    drafts = [one.draft is not None for one in (first, second)]
    hidden = not all(
        name in one.entries for one in (first, second) for name in _head(first, second)
    )
    skipped = set(_head(first, second)) if all(drafts) and hidden else set()
    config = _config_differences(first.config, second.config)
    only_a = [n for n in first.entries if n not in second.entries and n not in skipped]
    only_b = [n for n in second.entries if n not in first.entries and n not in skipped]
    common = [name for name in first.entries if name in second.entries]
    found = [_compare(first, second, name) for name in common]
    tensors = [row for row in found if row is not None]
    return {
        "a": {"file": str(first.path), "kind": first.kind},
        "b": {"file": str(second.path), "kind": second.kind},
        "config": config,
        "only_a": only_a,
        "only_b": only_b,
        "tensors": tensors,
        "same": len(common) - len(tensors),
        "draft": drafts,
        "draft_compared": all(drafts) and not skipped,
        "equal": not (config or only_a or only_b or tensors) and drafts[0] == drafts[1],
    }


def _head(*contents: Contents) -> list[str]:
    """The tensors of draft heads."""
    heads = [one.draft for one in contents if one.draft is not None]
    return sorted({name for head in heads for name in head.shapes})


def _config_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    keys = sorted((set(a) | set(b)) - {PRIVATE_BLOCK})
    pairs = {key: [a.get(key, _NOT_THERE), b.get(key, _NOT_THERE)] for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _compare(first: Contents, second: Contents, name: str) -> dict[str, Any] | None:
    """How the tensor `name` differs; None if it does not."""
    a, b = first.entries[name], second.entries[name]
    row: dict[str, Any] = {"name": name, "formats": [a.format, b.format]}
    if a.shape != b.shape:
        return {**row, "shapes": [list(a.shape), list(b.shape)]}
    left, right = first.values(name), second.values(name)
    if (left.codes is None) != (right.codes is None) and len(a.shape) == 2:
        if _same_values(left, right) or _same_values(right, left):
            return None
        row["ternarised"] = "a" if left.codes is None else "b"
        left, right = _ternarised(left), _ternarised(right)
    found = _ternary(left, right) if left.codes is not None else _dense(left, right)
    return None if found is None else row | found


def _same_values(dense: Values, ternary: Values) -> bool:
    """Whether a dense matrix holds what the other one's codes and scales multiply to."""
    if dense.dense is None or ternary.codes is None or ternary.scales is None:
        return False
    if dense.dense.dtype not in MASTERS:
        return False
    scales, columns = ternary.scales, ternary.codes.shape[1]
    if scales.dim() == 2:
        size = next(size for size in GROUP_SIZES if -(-columns // size) == scales.shape[1])
        scales = spread_scales(scales, size, columns)
    else:
        scales = scales[:, None]
    return torch.equal(dense.dense, (ternary.codes * scales).to(dense.dense.dtype))


def _ternarised(values: Values) -> Values:
    if values.dense is None:
        return values
    if values.dense.dtype not in MASTERS:
        dtype = str(values.dense.dtype).removeprefix("torch.")
        reject("dtype", "weights beside ternary ones as float32, bfloat16 or float16", dtype)
    codes, scale = ops.quantize_weights(values.dense)
    return Values(codes=codes, scales=scale)


def _ternary(a: Values, b: Values) -> dict[str, Any] | None:
    assert a.codes is not None and b.codes is not None
    assert a.scales is not None and b.scales is not None
    different = int(torch.count_nonzero(a.codes != b.codes))
    ratios = _ratios(a.scales, b.scales)
    low, high = (float(ratios.min()), float(ratios.max())) if len(ratios) else (1.0, 1.0)
    if different == 0 and low == high == 1.0:
        return None
    share = different / a.codes.numel()
    return {"codes_differing": share, "scale_ratio_min": low, "scale_ratio_max": high}


def _ratios(a: Tensor, b: Tensor) -> Tensor:
    """b / a of every scale, 1 where both are 0."""
    if a.dim() != b.dim():  # one of them has groups
        a, b = (t if t.dim() == 2 else t[:, None] for t in (a, b))
    if 1 < a.shape[-1] != b.shape[-1] > 1 and a.dim() == 2:  # of another size: 128 are two of 64
        maximum = max(a.shape[1], b.shape[1])
        a, b = (t.repeat_interleave(-(-maximum // t.shape[1]), dim=1)[:, :maximum] for t in (a, b))
    left, right = torch.broadcast_tensors(a.double(), b.double())
    return torch.where(left == right, torch.ones_like(left), right / left).reshape(-1)


def _dense(a: Values, b: Values) -> dict[str, Any] | None:
    assert a.dense is not None and b.dense is not None
    different, largest, magnitude = 0, 0.0, 0.0
    if not a.dense.numel():
        return None
    for left, right in zip(_pieces(a.dense), _pieces(b.dense), strict=True):
        left, right = left.double(), right.double()
        gap = (left - right).abs()
        different += int(torch.count_nonzero(gap))
        largest = max(largest, float(gap.max()))
        magnitude = max(magnitude, float(left.abs().max()))
    if different == 0:
        return None
    share = different / a.dense.numel()
    return {
        "values_differing": share,
        "max_difference": largest,
        "max_magnitude": magnitude,
    }


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.reshape(-1).split(1 << 22)  # bounds the float64 temporaries


# --- text -----------------------------------------------------------------------------------------


def lines(report: Mapping[str, Any]) -> list[str]:
    """The differences for people, one a line; the last line sums them up."""
    out = [f"{side}: {report[side]['file']} ({report[side]['kind']})" for side in ("a", "b")]
    for key, (left, right) in report["config"].items():
        out.append(f"config {key}: {left!r:.60} | {right!r:.60}")
    for side in ("a", "b"):
        out += [f"only in {side}: {name}" for name in report[f"only_{side}"]]
    out += [f"{row['name']}: {_words(row)}" for row in report["tensors"]]
    out += _draft_lines(report)
    differ = len(report["tensors"])
    if report["equal"]:
        return [*out, f"equal: {counted(report['same'], 'tensor')} and the config"]
    return [
        *out,
        f"{counted(report['same'], 'tensor')} equal, {differ} differ, "
        f"{len(report['only_a'])} only in a, {len(report['only_b'])} only in b, "
        f"{counted(len(report['config']), 'difference')} in the config",
    ]


def _draft_lines(report: Mapping[str, Any]) -> list[str]:
    a, b = report["draft"]
    if a != b:
        return [f"a draft head in {'a' if a else 'b'} alone"]
    if not a or report["draft_compared"]:
        return []
    return [
        "draft heads in both, not compared: model files hold them rounded; "
        "`bitnet-ops verify` compares one with its source"
    ]


def _words(row: Mapping[str, Any]) -> str:
    if "shapes" in row:
        return "shape " + " | ".join(" x ".join(map(str, shape)) for shape in row["shapes"])
    formats = " | ".join(row["formats"])
    if "codes_differing" in row:
        how = f", {row['ternarised']} ternarised by absmean" if "ternarised" in row else ""
        return (
            f"{formats}{how}: {100 * row['codes_differing']:.4g} % of codes differ, scale ratio "
            f"{row['scale_ratio_min']:.6g} to {row['scale_ratio_max']:.6g}"
        )
    return (
        f"{formats}: {100 * row['values_differing']:.4g} % of values differ, at most by "
        f"{row['max_difference']:.4g} (largest value {row['max_magnitude']:.4g})"
    )
