"""Hugging Face transformers as the reference of `convert --verify`, in fp32 on the CPU.

Some versions load offline AutoBitLinear weights wrongly (left in uint8, so that -1 reads 255);
that is repaired, and every ternary weight is checked before it may judge us. Anything that keeps
transformers from serving raises OracleUnavailable, and the plain forward steps in. The only module
of the converter that imports transformers.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bitnet_ops.convert.hf.source import HfSource


class OracleUnavailable(Exception):
    """Why transformers cannot serve as the reference here."""


class HfOracle:
    """The source checkpoint loaded by transformers: its ternary weights and its logits."""

    def __init__(self, source: HfSource) -> None:
        plan = source.plan
        if plan.scheme.assumed:
            raise OracleUnavailable("without quantization_config transformers would not ternarise")
        if plan.renamed:
            raise OracleUnavailable("its classes have other names for these tensors")
        if not plan.scheme.rounds_activations:
            raise OracleUnavailable("its class would not quantise the activations")
        scaling = plan.config.rope_scaling
        if scaling is not None and scaling.lists_differ:
            raise OracleUnavailable("it changes the list of longrope with the length of a text")
        if plan.config.embedding_only:
            raise OracleUnavailable("an embedding model has no logits there")
        with _quiet_and_eager() as transformers:
            self.name = f"transformers {transformers.__version__} fp32"
            self._model = _load(transformers, source)
        for name in plan.ternary:
            self._check(name)

    def _module(self, weight_name: str) -> Any:
        return self._model.get_submodule(weight_name.removesuffix(".weight"))

    def _check(self, weight_name: str) -> None:
        """Repair what 5.9 to 5.12 leave in uint8, then demand ternary weights."""
        module = self._module(weight_name)
        kind = type(module).__name__
        if kind not in ("BitLinear", "AutoBitLinear"):
            raise OracleUnavailable(f"it loaded {weight_name} as {kind}")
        if kind == "BitLinear" or module.online_quant:
            return
        if module.weight.dtype == torch.uint8:
            codes = module.weight.data.view(torch.int8).float()
            module.weight = torch.nn.Parameter(codes, requires_grad=False)
        if not torch.isin(module.weight, torch.tensor([-1.0, 0.0, 1.0])).all():
            raise OracleUnavailable(f"it loaded values other than -1, 0, 1 into {weight_name}")

    @torch.no_grad()
    def projection(self, weight_name: str) -> tuple[Tensor, float]:
        """(codes int8 [N, K], multiplying scale) as transformers uses them in a forward."""
        module = self._module(weight_name)
        with _quiet_and_eager():
            if type(module).__name__ == "BitLinear":
                from transformers.integrations.bitnet import unpack_weights

                codes = unpack_weights(module.weight, dtype=torch.float32)
                return codes.to(torch.int8), 1.0 / float(module.weight_scale)
            if not module.online_quant:
                return module.weight.to(torch.int8), float(module.weight_scale)
            from transformers.integrations.bitnet import WeightQuant

            values = WeightQuant.apply(module.weight)
        return values.sign().to(torch.int8), float(values.abs().max())

    @torch.no_grad()
    def logits(self, sequences: list[list[int]]) -> list[Tensor]:
        """fp32 logits [T, V] of every sequence of token ids."""
        with _quiet_and_eager():
            return [self._model(torch.tensor([ids])).logits[0].float() for ids in sequences]


def _load(transformers: Any, source: HfSource) -> Any:
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(source.path),
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # whatever it raises: then it cannot serve, and the report says why
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise OracleUnavailable(
            f"it cannot load it: {type(error).__name__}: {first_line}"
        ) from error
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.is_floating_point():  # some versions keep a bf16 file's dtype in places
            tensor.data = tensor.data.float()
    return model.eval()


@contextmanager
def _quiet_and_eager() -> Iterator[Any]:
    """transformers imported, its warnings and bars off, its torch.compile decorators disarmed."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when the decorators run, at import
    try:
        try:
            import transformers
            from transformers.utils import logging
        except ImportError as error:
            raise OracleUnavailable(f"transformers is not installed ({error})") from error
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            with torch.compiler.set_stance("force_eager"):  # if they were imported before us
                yield transformers
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
    finally:
        if before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before
