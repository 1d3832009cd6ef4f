"""`convert` for SGLBITNT files: a model.bin of any writer and version -> a folder in version 2.

Nothing is computed: codes, scales and values are copied, and compared with the source once the file
is written. Copies that other writers keep (model_contents.py) are checked and left out. It must not
know how a file is stored.
"""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path
from typing import Any

import torch

from bitnet_ops import ops
from bitnet_ops.config import PRIVATE_BLOCK, ModelConfig, UnsupportedModelError
from bitnet_ops.convert.destination import MODEL_FILE, TRAVELLERS, building, check_destination
from bitnet_ops.convert.errors import ConvertError, listed, refuse
from bitnet_ops.convert.hf.checkpoint import copy_files
from bitnet_ops.convert.hf.decide import LARGEST_SCALE
from bitnet_ops.convert.report import ConvertReport, Progress, TernaryTotals, file_sha256
from bitnet_ops.formats.sglbitnt import Reader, SglbitntError, Writer, is_sglbitnt, model_file
from bitnet_ops.loading.model_contents import completed_config, own_tensors
from bitnet_ops.models import TensorError, TensorSpec, check_names, expected_tensors


def is_bin(path: str | Path) -> bool:
    """Whether `path` is a .bin file of this format, or a folder with one and no checkpoint."""
    path = Path(path)
    return not (path / "config.json").is_file() and is_sglbitnt(model_file(path))


def convert_bin(
    src: str | Path,
    dst: str | Path,
    *,
    force: bool = False,
    format_version: int = 2,
    trust_scales: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write the model file `src` (a .bin, or the folder with model.bin) anew, as the folder `dst`.

    Args:
        dst: folder to create. Holds model.bin, the tokenizer files beside `src` and report.json.
        force: replace `dst` if it is an earlier result.
        format_version: of the new model.bin, 2, or 1 for readers that know no other (FORMAT.md).
        trust_scales: take scales above any known one, which look as if they should divide.
        progress: called as progress(done, total, tensor_name) before each tensor.

    Returns the report, which also lies in `dst`; every code, scale and value of the result has been
    compared with the source. Raises ConvertError; nothing is left at `dst` then.
    """
    started = time.perf_counter()
    source, target = model_file(src), Path(dst)
    try:
        with Reader(source, check_codes=False) as reader:
            plan = _Plan(reader)
            check_destination(source, target, force=force)
            plan.check_scales(trust_scales)
            with building(target, force=force) as folder:
                report = plan.write(folder, source, format_version, progress)
                plan.compare(folder / MODEL_FILE)
                report.seconds = round(time.perf_counter() - started, 3)
                report.write(folder)
    except SglbitntError as error:
        raise ConvertError(f"bin-{error.code}", f"convert: {error}") from error
    except OSError as error:
        refuse("write-failed", f"to write {target}", str(error), "nothing was kept")
    return report


class _Plan:
    """What the file holds, decided and checked before its data are read."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.config = completed_config(reader.config, reader.tensors)
        try:
            self.model = ModelConfig.from_hf(self.config)
            tensors = own_tensors(reader, self.model)
            check_names(self.model, tensors)
        except UnsupportedModelError as error:
            raise ConvertError("unsupported-model", f"convert: {error}") from None
        except TensorError as error:
            raise ConvertError("bin-tensors", f"convert: {error}") from None
        self.specs: dict[str, TensorSpec] = dict(expected_tensors(self.model))
        for name, spec in self.specs.items():
            self._check(name, spec)
        self.remarks = self._remarks([name for name in reader.tensors if name not in tensors])

    def _check(self, name: str, spec: TensorSpec) -> None:
        info = self._reader.tensors[name]
        rows = spec.kind == "ternary" and info.shape[0] == spec.shape[0]
        if info.packed != (spec.kind == "ternary") or not (rows or info.shape == spec.shape):
            form = f"{info.dtype} {list(info.shape)}".removeprefix("torch.")
            refuse("shape", f"{name} {spec.kind} of shape {list(spec.shape)}", form)
        if info.packed:
            self._reader.check_in_features(name, spec.shape[1])

    def _remarks(self, copies: list[str]) -> list[str]:
        remarks = list(self.model.notes)
        if copies:
            remarks.append(f"left out, since they repeat others: {listed(copies)}")
        if self._reader.config.get("model_type") is None:
            remarks.append(f"model_type is absent: {self.model.model_type!r}, by what the file has")
        return remarks

    def check_scales(self, trusted: bool) -> None:
        """Refuse what only a scale that should divide would explain; no one can tell for sure."""
        for name, spec in self.specs.items():
            if trusted or spec.kind != "ternary":
                continue
            largest = float(self._reader.scales(name).max())
            if largest > LARGEST_SCALE:
                refuse(
                    "scale-sense",
                    f"a scale of {name} that multiplies",
                    f"{largest:.4g}, far above any known one",
                    "its writer may have taken a bitlinear checkpoint's weight_scale, which "
                    "divides: convert that checkpoint, or use --trust-scales if the file is right",
                )

    def write(
        self, folder: Path, source: Path, version: int, progress: Progress | None
    ) -> ConvertReport:
        totals, reader = TernaryTotals(), self._reader
        output = folder / MODEL_FILE
        with Writer(output, self._config(), len(self.specs), self.specs, version=version) as writer:
            for done, (name, spec) in enumerate(self.specs.items()):
                if progress is not None:
                    progress(done, len(self.specs), name)
                reader.check_data(name)
                if spec.kind == "dense":
                    writer.add_dense(name, reader.tensor(name))
                else:
                    self._write_ternary(name, spec.shape[1], writer, totals)
                reader.release(name)
        dense = [spec for spec in self.specs.values() if spec.kind == "dense"]
        block = self._config()[PRIVATE_BLOCK]
        return ConvertReport(
            source=source.resolve().name,
            model_type=self.model.model_type,
            linear_class=str(block.get("source_linear_class")),
            quantization_mode=str(block.get("source_mode")),
            assumed_online=False,
            tensors=len(self.specs),
            dense_parameters=sum(torch.Size(spec.shape).numel() for spec in dense),
            ternary=totals,
            source_bytes=source.stat().st_size,
            output_bytes=output.stat().st_size,
            seconds=0.0,
            sha256=file_sha256(output),
            files=[MODEL_FILE, *copy_files(source.parent, folder, TRAVELLERS)],
            remarks=self.remarks,
        )

    def _write_ternary(self, name: str, k: int, writer: Writer, totals: TernaryTotals) -> None:
        info, rows = self._reader.tensors[name], self._reader.tensor(name)
        scales = self._reader.scales(name).to(info.scale_dtype)  # as stored
        totals.add(ops.unpack(rows, k), scales)
        writer.add_packed(name, rows, scales, k, info.group_size)

    def _config(self) -> dict[str, Any]:
        """The file's config; a private block that is there says where the model comes from."""
        made = {
            "format_version": 1,
            "source_linear_class": "SGLBITNT",
            "source_mode": f"version {self._reader.version}",
            "converter_version": importlib.metadata.version("bitnet-ops"),
        }
        return {**self.config, PRIVATE_BLOCK: self.config.get(PRIVATE_BLOCK, made)}

    def compare(self, file: Path) -> None:
        """The new file must hold what the source does, bit for bit."""
        with Reader(file, check_codes=False) as made:
            wrong = [name for name in self.specs if not self._same(made, name)]
        if wrong:
            refuse(
                "verification-failed",
                "the result to hold what its source does",
                f"other bytes in {listed(wrong)}",
                "the result was not kept, please report this file",
            )

    def _same(self, made: Reader, name: str) -> bool:
        ours, theirs = made.tensors[name], self._reader.tensors[name]
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        same = same and made.memory(name) == self._reader.memory(name)
        if same and theirs.packed:
            same = torch.equal(made.scales(name), self._reader.scales(name))
        made.release(name)
        self._reader.release(name)
        return same
