"""A Hugging Face checkpoint folder as a source: read, planned, its projections made ternary.

A LoRA adapter is merged into the masters tensor by tensor, so that everything that reads the
source, the oracle of --verify included, sees W + B A * scaling in float32: rounding to bf16 first,
as merging with peft in bf16 does, would lose a part of the adapter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bitnet_ops.config import ModelConfig
from bitnet_ops.config.scheme import Storage
from bitnet_ops.convert.checkpoint import Checkpoint, check_embedding, copy_tokenizer
from bitnet_ops.convert.draft import DraftHead
from bitnet_ops.convert.draft_sources import checkpoint_head
from bitnet_ops.convert.errors import ConvertError, reject
from bitnet_ops.convert.hybrid import GATED_NORM, as_here, has_summed_norms
from bitnet_ops.convert.plan import check_scale_sense, make_plan, scale_name
from bitnet_ops.convert.source import EMBEDDING, HEAD, Source, Ternary
from bitnet_ops.convert.ternary import (
    check_finite,
    from_masters,
    from_packed,
    from_ternary,
    looks_ternary,
    packed_scale,
)
from bitnet_ops.convert.tower import Stored, Tower, checkpoint_tower, image_ids
from bitnet_ops.nn.lora import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Adapter,
    LoraError,
    LoraWeight,
    own_module,
    read_adapter,
)


class HfSource(Source):
    """A planned checkpoint.

    Args:
        assume_online: take a checkpoint without quantization_config for masters.
        lora: a PEFT directory; `check` merges it.
        trust_scales: let pass scales that look as if taken in the wrong sense.
    """

    noun = "checkpoint"

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        assume_online: bool = False,
        lora: str | Path | None = None,
        trust_scales: bool = False,
    ) -> None:
        self.checkpoint, self.nbytes = checkpoint, checkpoint.weight_bytes
        self.path = self.tokenizer_folder = checkpoint.folder
        if lora is None and (self.path / CONFIG_FILE).is_file():
            reject(
                "adapter-beside",
                "a checkpoint without a LoRA adapter beside it",
                f"{CONFIG_FILE} in {self.path}",
                f"--lora {self.path} merges it into masters; or move the adapter's files to a "
                "folder of their own",
            )
        self.plan = make_plan(
            checkpoint.config,
            checkpoint.tensors,
            assume_online=assume_online,
            looks_ternary=lambda name: looks_ternary(checkpoint.tensor(name)),
            found=checkpoint.found,
        )
        self.summed_norms = self.plan.config.family.hybrid and has_summed_norms(
            {name: record.shape for name, record in checkpoint.tensors.items()},
            package=bool(checkpoint.packed_mlx),
        )
        self.adapter: Adapter | None = None
        self._factors: dict[str, LoraWeight] = {}  # of the adapter, by tensor
        self._lora, self._trusted = lora, trust_scales
        self._inner_offset = 0.0

    def check(self) -> None:
        """Read the adapter and all scales, compare a repeated head, list the remarks."""
        if self._lora is not None:
            self.adapter = self._read_adapter(self._lora)
        if not self._trusted and self.plan.scheme.storage is Storage.PACKED:
            scales = {name: self._scale(name) for name in self.plan.ternary}
            check_scale_sense(scales, self.plan.scheme)
        if self.plan.config.embedding_only:
            check_embedding(self.path)
        self._inner_offset = self._find_inner_offset()
        if self.plan.tied_head:
            self._check_tied_head()
        self.remarks = self._remarks()

    def tensor(self, name: str) -> Tensor:
        """The tensor `name` as stored; masters with an adapter are float32."""
        tensor = self.checkpoint.tensor(self.plan.stored[name])
        lora = self._factors.get(name)
        return tensor if lora is None else tensor.float() + lora.delta()

    def dense(self, name: str) -> Tensor:
        tensor = self.tensor(name)
        check_finite(name, tensor)
        if self.plan.config.family.hybrid:
            tensor = as_here(name, tensor)
        if name.endswith("norm.weight"):
            return tensor.float() + offset if (offset := self._norm_offset(name)) else tensor
        if name.endswith(".bias") and self.plan.scheme.bias_is_scaled:
            return tensor.float() * self._scale(f"{name.removesuffix('.bias')}.weight")
        return tensor

    def ternary(self, name: str) -> Ternary:
        scheme = self.plan.scheme
        if scheme.storage is Storage.PACKED:
            return Ternary.packed(*self.codes(name))
        if scheme.storage is Storage.TERNARY:
            codes, scales, group_size, uneven = from_ternary(name, self.tensor(name))
            return Ternary.packed(codes, scales, None, group_size, uneven)
        return Ternary.packed(*from_masters(name, self.tensor(name), scheme))

    def codes(self, name: str) -> tuple[Tensor, float]:
        """(codes int8 [N, K], multiplying scale) of the packed weight `name`."""
        rows = self.plan.specs[name].shape[0]
        return from_packed(name, self.tensor(name), rows), self._scale(name)

    def own_tower(self) -> Tower | None:
        return tower_of(self.checkpoint, self.plan.tower)

    def own_draft(self) -> DraftHead | None:
        if not self.plan.drafts:
            return None
        model, summed = self.plan.config, self.summed_norms
        return head_of(self.checkpoint, self.plan.drafts, model, summed, "the checkpoint")

    def image_ids(self) -> dict[str, int]:
        return image_ids(self.path)

    def unwritten_rows(self, name: str) -> int:
        return self.checkpoint.unwritten_rows(self.plan.stored[name])

    def finish(self, folder: Path) -> list[str]:
        names, remarks = copy_tokenizer(self.path, folder)
        self.remarks += remarks
        return names

    def files(self) -> dict[str, Path]:
        """config.json, the tokenizer, every weight file and a merged adapter."""
        names = {record.file for record in self.checkpoint.tensors.values()}
        names |= {name for name in ("tokenizer.json",) if (self.path / name).is_file()}
        files = {name: self.path / name for name in ["config.json", *sorted(names)]}
        if self.adapter is not None:
            files |= {name: self.adapter.folder / name for name in (CONFIG_FILE, WEIGHTS_FILE)}
        return files

    def _norm_offset(self, name: str) -> float:
        """What a norm multiplies by is the stored weight and this."""
        if self.summed_norms or name.endswith(GATED_NORM):
            return 0.0
        inside = name.endswith(".rms_norm.weight")
        return self._inner_offset if inside else self.plan.config.family.norm_offset

    def _find_inner_offset(self) -> float:
        """0 or 1 for norms inside projections, whose sense no config.json states.

        In a family whose other norms multiply by 1 + w they may or may not. Trained weights lie
        near the 1 they started from, or near 0; where they say neither, nothing is guessed.
        """
        offset = self.plan.config.family.norm_offset
        if not offset or not self.plan.config.linear_norms:
            return 0.0
        names = [name for name in self.plan.specs if name.endswith(".rms_norm.weight")]
        medians = [float(self.tensor(name).float().median()) for name in names]
        low, high = min(medians), max(medians)
        if low <= 0.5 <= high or low < -0.5:
            reject(
                "inner-norms",
                f"norms inside projections that are all near 1 (w) or all near 0 ({offset:g} + w)",
                f"medians from {low:.3g} to {high:.3g}",
                "the checkpoint does not say which of them it means",
            )
        return 0.0 if low > 0.5 else offset

    def _scale(self, name: str) -> float:
        """The multiplying scale of the packed weight `name`."""
        return packed_scale(name, self.tensor(scale_name(name)), self.plan.scheme)

    def _read_adapter(self, folder: str | Path) -> Adapter:
        """The adapter in `folder`; ConvertError where it does not fit the masters."""
        scheme, plan = self.plan.scheme, self.plan
        if scheme.storage is not Storage.MASTERS:
            reject(
                "lora-packed",
                "master weights to merge an adapter into",
                f"{scheme.linear_class} {scheme.quantization_mode}, ternary already",
                "convert without --lora, and give --lora to generate: it runs beside the model",
            )
        try:
            adapter = read_adapter(folder)
        except LoraError as error:
            raise ConvertError("lora", f"convert: {error}") from error
        # under the name here, or as the checkpoint spells it
        stored = {own_module(plan.stored[n].removesuffix(".weight")): n for n in plan.ternary}
        named = stored | {name.removesuffix(".weight"): name for name in plan.ternary}
        for module, lora in adapter.weights.items():
            name, shape = named.get(module), [len(lora.b), lora.a.shape[1]]
            record = None if name is None else self.checkpoint.tensors[plan.stored[name]]
            if name is None or record is None or list(record.shape) != shape:
                found = "none of that name" if record is None else f"{list(record.shape)}"
                expected = f"a projection {module}.weight {shape}, as the adapter has it"
                reject("lora", expected, found, "the adapter belongs to another model")
            if name in self._factors:
                reject("lora", f"one adapter of {name}", f"two, one of them as {module}")
            self._factors[name] = lora
        return adapter

    def _check_tied_head(self) -> None:
        """A tied checkpoint may repeat the embedding as lm_head.weight, but not otherwise."""
        if not torch.equal(self.tensor(HEAD), self.tensor(EMBEDDING)):
            reject(
                "tie-mismatch",
                f"{HEAD} equal to {EMBEDDING}, since tie_word_embeddings is true",
                "different values",
                "if the head is its own matrix, set tie_word_embeddings to false",
            )

    def _remarks(self) -> list[str]:
        plan, checkpoint = self.plan, self.checkpoint
        remarks = [*plan.remarks, *checkpoint.remarks]
        if plan.config.embedding_only:
            remarks.append("an embedding model: it has no head and generates no text; use embed()")
        if self.adapter is not None:
            remarks.append(f"{self.adapter.describe()} merged into the masters")
        if checkpoint.pickled:
            remarks.append("read from pickles, which were opened with weights_only=True")
        if files := checkpoint.code_files():
            listed = ", ".join(files)
            remarks.append(f"code shipped with the checkpoint was not run: {listed}")
        if checkpoint.packed_mlx:
            remarks.append(
                f"MLX package: {len(checkpoint.packed_mlx)} matrices of 2 bits in groups"
            )
        if plan.config.linear_norms and plan.config.family.norm_offset:
            sense = "1 + w" if self._inner_offset else "w, not by 1 + w as others do here"
            remarks.append(f"norms inside projections multiply by {sense}: so their values say")
        if plan.tied_head:
            remarks.append(f"{HEAD} repeats the embedding and was not written")
        if buffers := sum(name.endswith(".rotary_emb.inv_freq") for name in plan.stored):
            remarks.append(f"{buffers} rotary inv_freq buffers follow from rope_theta; ignored")
        return [*remarks, *([plan.scheme.remark] if plan.scheme.remark else [])]


def head_of(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    model: ModelConfig,
    summed: bool,
    origin: str,
) -> DraftHead:
    """The draft head of a checkpoint; `names`: stored ones by names from `mtp.` on.

    summed: its norms hold what they multiply by. Raises HeadError for one of another kind.
    """
    records = {name: checkpoint.tensors[stored] for name, stored in names.items()}
    forms = {name: (record.dtype, record.shape) for name, record in records.items()}

    def read(name: str) -> Tensor:
        return checkpoint.tensor(names[name])

    config = checkpoint.config
    return checkpoint_head(config, model, forms, read, summed=summed, origin=origin)


def tower_of(checkpoint: Checkpoint, names: Mapping[str, str]) -> Tower | None:
    """The tower for images of a checkpoint; `names`: stored ones by names inside it (Naming).

    None without one, or where config.json does not say what its tensors are.
    """
    published = checkpoint.published
    if not names or not isinstance(published.get("vision_config"), Mapping):
        return None
    preprocessor, files = checkpoint.preprocessor()
    shapes = {name: checkpoint.tensors[stored].shape for name, stored in names.items()}
    stored = Stored(shapes, lambda name: checkpoint.tensor(names[name]))
    found = checkpoint_tower(published, preprocessor, image_ids(checkpoint.folder), stored)
    return dataclasses.replace(found, files=files)
