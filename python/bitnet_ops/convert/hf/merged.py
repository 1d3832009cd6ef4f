"""A checkpoint with a LoRA adapter merged into its master weights, tensor by tensor.

Everything that reads the source, the oracle of `--verify` included, then sees W + B A * scaling in
float32: rounding to bf16 first, as merging with peft in bf16 does, would lose a part of the
adapter. It must not know how masters are ternarised.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from bitnet_ops.convert.errors import ConvertError, refuse
from bitnet_ops.convert.hf.checkpoint import Source
from bitnet_ops.convert.hf.plan import Plan
from bitnet_ops.nn.lora import Adapter, LoraError, read_adapter


class MergedSource(Source):
    """A Source whose projections have the adapter in `adapter` added."""

    adapter: Adapter

    @classmethod
    def merge(cls, source: Source, plan: Plan, folder: str | Path) -> MergedSource:
        """`source` with the adapter in `folder`; ConvertError where they do not fit together."""
        if plan.scheme.mode != "masters":
            refuse(
                "lora-packed",
                "master weights to merge an adapter into",
                f"{plan.scheme.linear_class} {plan.scheme.quantization_mode}, ternary already",
                "convert without --lora, and give --lora to generate: it runs beside the model",
            )
        merged = cls.__new__(cls)
        merged.__dict__.update(source.__dict__)
        try:
            merged.adapter = read_adapter(folder)
        except LoraError as error:
            raise ConvertError("lora", f"convert: {error}") from error
        ternary = [plan.stored[n] for n, spec in plan.specs.items() if spec.kind == "ternary"]
        projections = {name: source.tensors[name] for name in ternary}
        for module, lora in merged.adapter.weights.items():
            record = projections.get(f"{module}.weight")
            shape = [len(lora.b), lora.a.shape[1]]
            if record is None or list(record.shape) != shape:
                found = "none of that name" if record is None else f"{list(record.shape)}"
                expected = f"a projection {module}.weight {shape}, as the adapter has it"
                refuse("lora", expected, found, "the adapter is another model's")
        return merged

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`; masters with an adapter are float32."""
        tensor = super().tensor(name)
        lora = self.adapter.weights.get(name.removesuffix(".weight"))
        return tensor if lora is None else tensor.float() + lora.delta()
