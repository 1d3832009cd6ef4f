"""What weight_format="auto" means for a model: the layout that is the fastest for its use.

"1.6bit" reads a fifth less than "2bit" and computes more for it. A step that decodes one text reads
every weight for one token: "1.6bit" is the faster one where memory is the limit, "2bit" where the
cores are. Which they are depends on CPU, kernels and threads, so it is measured (weight_probe.py),
once a day for a machine. Steps of many tokens (prompts, many sequences, drafts) wait for the cores
everywhere: they take "2bit".

A model file holds canonical rows, whatever it was converted from, TQ1_0's 1.6 bits included: both
layouts are made of them at every load, "1.6bit" in a sixth more time (.2 s for 2B-4T). "canonical"
itself is not chosen: it saves this time and the memory, and is slower at every step. Results are
the same in each of them.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bitnet_ops import machine
from bitnet_ops.arguments import shown
from bitnet_ops.config.draft import PREFIX as DRAFTS
from bitnet_ops.formats import sglbitnt
from bitnet_ops.loading.model_contents import model_config
from bitnet_ops.loading.resolve import LoadError
from bitnet_ops.loading.weight_probe import SMALL_FORMAT, Probe, last_cache, probe_here
from bitnet_ops.memory.arena import Arena, aligned
from bitnet_ops.nn.packing import packed_shape
from bitnet_ops.nn.storage import FORMATS, LAYOUTS, USUAL_FORMAT

ENVIRONMENT = "BITNET_OPS_WEIGHT_FORMAT"
USES = ("single", "batch")

# SMALL_FORMAT is taken where its products of one token need less than this share of the time. What
# it loses is prompts, which are 5 % slower: a saving of 7 % in the products of a 2B model is 4 % of
# a step, and a step takes as long as six tokens of a prompt, so every text gains whose answer has
# at least a fifth of its prompt's tokens. Probes of one machine differ by half as much.
MARGIN = 0.93


def check_use(use: str) -> None:
    """Raise ValueError unless `use` is one of USES."""
    if not isinstance(use, str) or use not in USES:
        raise ValueError(f"use: expected one of {', '.join(USES)}, got {shown(use)}")


@dataclass(frozen=True)
class Matrices:
    """What a choice needs to know of a model: its ternary matrices (N, K), the group of scales."""

    shapes: tuple[tuple[int, int], ...]
    group_size: int = 0

    @classmethod
    def of_tensors(cls, infos: Iterable[sglbitnt.TensorInfo]) -> Matrices:
        """Of a model file, but for a draft head."""
        packed = [info for info in infos if info.packed and not info.name.startswith(DRAFTS)]
        fields = LAYOUTS["canonical"]["fields"]
        return cls(
            tuple((t.shape[0], t.in_features or t.shape[1] * fields) for t in packed),
            max((t.group_size for t in packed), default=0),
        )

    def bytes(self, weight_format: str) -> int:
        """What the codes take in a layout, in an Arena."""
        return sum(aligned(math.prod(packed_shape(n, k, weight_format))) for n, k in self.shapes)


@dataclass(frozen=True)
class WeightChoice:
    """A layout, as `load_model` takes it, and why.

    probe: what was measured, if that decided. arena: the memory it was measured in, which the model
    may be loaded into.
    """

    weight_format: str
    reason: str
    probe: Probe | None = None
    arena: Arena | None = field(default=None, repr=False, compare=False)


def choose_for_file(
    file: Path,
    use: str = "single",
    activation_format: str = "auto",
    cache: str | os.PathLike[str] | None = None,
) -> WeightChoice:
    """As `choose`, for a model file that is loaded next, into the choice's `arena` if it has one.

    Raises what reading the file raises, and LoadError.
    """
    reader = sglbitnt.Reader(file, check_codes=False)
    if model_config(reader).embedding_only:  # whole texts at once
        use = "batch"
    matrices = Matrices.of_tensors(reader.tensors.values())
    arenas: list[Arena] = []

    def memory() -> torch.Tensor:
        arenas.append(Arena(matrices.bytes(USUAL_FORMAT)))
        return arenas[-1].memory

    choice = choose(matrices, use, activation_format, cache, memory)
    return dataclasses.replace(choice, arena=arenas[-1] if arenas else None)


def choose(
    matrices: Matrices,
    use: str = "single",
    activation_format: str = "auto",
    cache: str | os.PathLike[str] | None = None,
    memory: Callable[[], torch.Tensor] | None = None,
) -> WeightChoice:
    """What "auto" means for these matrices, on as many threads as torch has now.

    Args:
        use: "single", one text after another; "batch", many tokens a step.
        activation_format, cache: as `language_model.load` takes them.
        memory: as of `weight_probe.measure`.
    Raises LoadError where BITNET_OPS_WEIGHT_FORMAT, which decides if it is set, names no layout.
    """
    check_use(use)
    if (named := named_format()) is not None:
        return WeightChoice(named, f"{ENVIRONMENT} says so")

    def probe() -> Probe | None:
        return probe_here(matrices.group_size, activation_format, cache, memory)

    available = machine.memory_bytes()["available"]
    return decide(matrices, use, last_cache(), available, probe)


def named_format() -> str | None:
    """What BITNET_OPS_WEIGHT_FORMAT names, None where it is not set; LoadError for no layout."""
    named = os.environ.get(ENVIRONMENT)
    if named and named not in FORMATS:
        raise LoadError(
            f"{ENVIRONMENT}: expected one of {', '.join(FORMATS)}, got {shown(named)}; unset it, "
            "or name one of them"
        )
    return named or None


def decide(
    matrices: Matrices,
    use: str,
    cache_bytes: int,
    available: int | None,
    probe: Callable[[], Probe | None],
) -> WeightChoice:
    """The rule. `probe` is asked only where its answer counts; None: it could not be measured."""
    widest = max((k for _, k in matrices.shapes), default=0)
    if any(widest > LAYOUTS[name]["max_in_features"] for name in (USUAL_FORMAT, SMALL_FORMAT)):
        return WeightChoice("auto", f"a matrix of {widest} columns fits no other layout")
    usual, small = (matrices.bytes(name) for name in (USUAL_FORMAT, SMALL_FORMAT))
    if available is not None and small < available < usual:
        room = f"{usual >> 20} MiB of {USUAL_FORMAT} do not fit in the {available >> 20} available"
        return WeightChoice(SMALL_FORMAT, room)
    if use == "batch":
        return WeightChoice(USUAL_FORMAT, "steps of many tokens wait for the cores")
    if usual <= cache_bytes:
        return WeightChoice(USUAL_FORMAT, "the weights fit in a cache, so the cores decide")
    found = probe()
    if found is None:
        return WeightChoice(USUAL_FORMAT, "there is no memory to measure in")
    if found.busy:
        reason = "others had the CPUs while it was measured; the next load measures again"
        return WeightChoice(USUAL_FORMAT, reason, found)
    below = found.ratio < MARGIN
    reason = (
        f"products of one token take {found.ratio:.2f} of the time with {SMALL_FORMAT}, "
        f"{'less' if below else 'not less'} than {MARGIN:g}; {_origin(found)}"
    )
    return WeightChoice(SMALL_FORMAT if below else USUAL_FORMAT, reason, found)


def _origin(probe: Probe) -> str:
    ago = "by an earlier load" if probe.kept else f"in {1e3 * probe.seconds:.0f} ms"
    return f"measured {ago}"
