"""Which draft head a conversion takes: the source's own, or that of a base model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.families import family_of
from bitnet_ops.config.hybrid import ROTATION
from bitnet_ops.convert import gguf_source, hf_source
from bitnet_ops.convert.bin_source import BinSource, is_bin
from bitnet_ops.convert.checkpoint import Checkpoint
from bitnet_ops.convert.draft import DraftHead, HeadError, check_turned
from bitnet_ops.convert.errors import ConvertError, reject
from bitnet_ops.convert.gguf_config import architecture_of, hf_config
from bitnet_ops.convert.hybrid import DRAFTS, counted, has_summed_norms
from bitnet_ops.convert.plan import find_naming
from bitnet_ops.convert.source import Source, folder_tokens, model_of
from bitnet_ops.formats.gguf import GgufError, is_gguf
from bitnet_ops.formats.gguf import Reader as GgufReader

_NONE = "--draft-from BASE takes one from the base model"
# what a head shares with its trunk, so that another model's would draft nonsense
_SHARED = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rotary_dim",
    "rope_theta", "rms_norm_eps", "vocab_size",
)  # fmt: skip


@contextmanager
def with_draft(
    source: Source, base: str | Path | None = None, wanted: bool = True, feed: str | None = None
) -> Iterator[None]:
    """Give `source` its draft head, open meanwhile, or a remark why it has none.

    base: a checkpoint, GGUF or model file to take it from; it must fit then. feed: as of
    DraftConfig, None: the head's own.
    """
    if base is not None:
        with _base_head(Path(base), source) as head:
            _check_rotation(head, source)
            _take(source, head.fed(feed))
            yield
        return
    count, head_found, reason = source.drafts(), None, ""
    if wanted and count:
        try:
            head_found = source.own_draft()
            if head_found is not None:
                _check_rotation(head_found, source)
        except HeadError as error:
            head_found, reason = None, str(error)
    if head_found is not None:
        _take(source, head_found.fed(feed))
    else:
        if feed is not None:
            reject("draft-feed", "a draft head for --draft-feed", reason or "none",
                   _NONE)  # fmt: skip
        source.draft_remarks = [*counted([DRAFTS] * count), *_why_none(source, reason, wanted)]
    yield


def _take(source: Source, head: DraftHead) -> None:
    source.draft, source.draft_remarks = head.in_digits(), head.remarks


def _why_none(source: Source, reason: str, wanted: bool) -> list[str]:
    if reason:
        return [f"no draft head: {reason}"]
    stated = source.plan.hf_config.get("mtp_num_hidden_layers")
    if wanted and not source.drafts() and source.noun == "checkpoint" and stated:
        return [f"config.json speaks of a layer that drafts tokens, which is not there: {_NONE}"]
    return []


def _check_rotation(head: DraftHead, source: Source) -> None:
    def signs(width: int) -> Tensor:
        return source.dense(f"{ROTATION}{width}.weight")

    check_turned(head, source.plan.config, signs)


@contextmanager
def _base_head(path: Path, source: Source) -> Iterator[DraftHead]:
    """The head of the base model at `path`; ConvertError where it does not fit `source`."""
    if not path.exists():
        reject("draft-base", f"a base model at {path}", "no such file or directory")
    try:
        if is_gguf(path):
            yield from _gguf_base(path, source)
        elif is_bin(path):
            yield from _bin_base(path, source)
        else:
            yield _folder_base(path, source)
    except HeadError as error:
        remedy = f"{path.name} has no head for this model; without --draft-from none is written"
        message = f"convert: expected {error.expected}, got {error.found}; {remedy}"
        raise ConvertError(error.code, message) from None


def _folder_base(path: Path, source: Source) -> DraftHead:
    checkpoint = Checkpoint(path, drafts_alone=True)
    config = checkpoint.config
    drafts = find_naming(config, family_of(config), checkpoint.tensors).drafts
    _check_pair(path, model_of(config), folder_tokens(path), source, len(drafts))
    shapes = {name: record.shape for name, record in checkpoint.tensors.items()}
    summed = has_summed_norms(shapes, package=bool(checkpoint.packed_mlx))
    head = hf_source.head_of(checkpoint, drafts, source.plan.config, summed, path.name)
    names = {checkpoint.tensors[stored].file for stored in drafts.values()}
    return _with_files(head, path, {n: path / n for n in ("config.json", *sorted(names))})


def _gguf_base(path: Path, source: Source) -> Iterator[DraftHead]:
    try:
        with GgufReader(path) as reader:
            architecture = architecture_of(reader.metadata)
            tokens = gguf_source.metadata_tokens(reader)
            table = reader.tensors.get("token_embd.weight")
            rows = table.shape[0] if table is not None else source.plan.config.vocab_size
            tied = "output.weight" not in reader.tensors
            config, _ = hf_config(reader.metadata, architecture, rows, tied, {})
            count = len(gguf_source.draft_tensors(reader, architecture))
            _check_pair(path, model_of(config), tokens, source, count)
            head = gguf_source.head_of(reader, architecture, source.plan.config, path.name)
            assert head is not None
            yield _with_files(head, path, {path.name: path})
    except GgufError as error:
        raise ConvertError(f"gguf-{error.code}", f"convert: {error.message}") from error


def _bin_base(path: Path, source: Source) -> Iterator[DraftHead]:
    with BinSource.opened(path) as base:
        _check_pair(path, base.plan.config, base.tokens(), source, base.drafts())
        head = base.own_draft()
        assert head is not None
        yield _with_files(head, path, base.files())


def _with_files(head: DraftHead, path: Path, files: Mapping[str, Path]) -> DraftHead:
    """The same with the files of the base model, under names that are not the source's."""
    name = path.resolve().name
    config = dataclasses.replace(head.config, origin=name)
    named = {f"{name}/{file}": place for file, place in files.items()}
    return dataclasses.replace(head, config=config, files=named)


def _check_pair(
    path: Path, base: ModelConfig, tokens: Mapping[int, str], source: Source, count: int
) -> None:
    """Reject a base model without a head, or whose head was trained over another trunk."""
    if not count:
        reject("draft-none", f"a layer that drafts tokens in {path.name}", "none",
               "name the checkpoint, or the GGUF file, that has its mtp tensors")  # fmt: skip
    model = source.plan.config
    for name in _SHARED:
        if getattr(base, name) != getattr(model, name):
            reject("draft-pair", f"{name} {getattr(model, name)} in {path.name}, as this model's",
                   f"{getattr(base, name)}", "it is the base of another model")  # fmt: skip
    own = source.tokens()
    wrong = sorted(i for i in own.keys() & tokens.keys() if own[i] != tokens[i])
    if wrong:
        expected = f"the tokens of {path.name} to be this model's ({own[wrong[0]]!r:.40} as "
        found = f"{tokens[wrong[0]]!r:.40}, and {len(wrong)} tokens that differ in all"
        reject("draft-vocabulary", f"{expected}{wrong[0]})", found,
               "a head drafts in the tokens that it was trained with")  # fmt: skip
