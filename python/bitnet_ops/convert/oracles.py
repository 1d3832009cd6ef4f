"""The references of `convert --verify`: transformers, or the plain forward over the source itself.

Each reads the source another way than the converter does. transformers runs in fp32 on the CPU.
Some versions load offline AutoBitLinear weights wrongly (left in uint8, so that -1 reads 255);
that is repaired, and every ternary weight is checked before it may judge us. Anything that keeps
transformers from serving raises OracleUnavailable, and the plain forward (forward.py) steps in.

A GGUF file is decoded a second time: TQ1_0 and TQ2_0 go through the gguf package, I2_S and Q2_0
element by element from their definition, q and k are turned back by reshaping. The only module of
the converter that imports transformers.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitnet_ops.config.scheme import ScaleRule, Storage
from bitnet_ops.convert.errors import reject
from bitnet_ops.convert.forward import DeltaNet, Forward, Maths, Prompt
from bitnet_ops.convert.gguf_config import PERMUTED
from bitnet_ops.convert.gguf_source import GgufSource, scale_name
from bitnet_ops.convert.hf_source import HfSource
from bitnet_ops.convert.source import Plan, Source
from bitnet_ops.convert.tower import Tower
from bitnet_ops.errors import BitNetError, install
from bitnet_ops.nn.rotary import rotary
from bitnet_ops.vision.config import VisionConfig


class OracleUnavailable(BitNetError):
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
    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """fp32 logits [T, V] of every sequence of token ids."""
        with _quiet_and_eager():
            return [self._model(torch.tensor([list(ids)])).logits[0].float() for ids in sequences]


@torch.no_grad()
def tower_features(
    tower: Tower, pixels: Tensor, grids: list[tuple[int, int]]
) -> tuple[str, list[Tensor]]:
    """(the reference's name, its rows for each image) of a source's tower, in float32.

    `pixels`: [patches, 1536], each image at both times. Raises OracleUnavailable.
    """
    try:
        with _quiet_and_eager() as transformers:
            model = transformers_tower(tower.config).float()
            for name, parameter in model.named_parameters():
                parameter.copy_(tower.read(name))
            rows = model(pixels, grid_thw=torch.tensor([(1, *grid) for grid in grids]))
    except (ImportError, AttributeError, TypeError) as error:
        raise OracleUnavailable(f"it has no such tower: {error}") from error
    counts = [height * width // 4 for height, width in grids]
    name = f"transformers {transformers.__version__} fp32"
    return name, list(rows.pooler_output.split(counts))


def transformers_tower(config: VisionConfig) -> Any:
    """transformers' own tower of that config, with random weights.

    Raises ImportError, AttributeError or TypeError where it has no such class.
    """
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    about = Qwen3_5VisionConfig(
        depth=config.depth,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        intermediate_size=config.intermediate_size,
        out_hidden_size=config.out_hidden_size,
        num_position_embeddings=config.num_position_embeddings,
    )
    return Qwen3_5VisionModel(about).eval()


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


# The plain forward over a source ------------------------------------------------------------------


class PlainOracle:
    """The source as a reference: its ternary weights and its logits."""

    name = "plain fp64 forward"

    def __init__(self, source: Source, *, int8_activations: bool = True) -> None:
        self._source, self._plan = source, source.plan
        self._int8 = int8_activations

    def projection(self, weight_name: str) -> tuple[Tensor, float | Tensor]:
        """(codes int8 [N, K], multiplying scale) of one projection, straight from the source.

        Where a matrix may have several scales, every weight has its own: [N, K], 0 where it is 0.
        """
        stored, scheme = self._read(weight_name), self._plan.scheme
        if scheme.storage is Storage.MASTERS:
            return _ternarise(stored.float())
        if scheme.storage is Storage.TERNARY:
            return stored.float().sign().to(torch.int8), stored.float().abs()
        value = float(self._read(f"{weight_name}_scale").float())
        return _unpack_quarters(stored), 1.0 / value if scheme.rule is ScaleRule.DIVIDE else value

    @torch.inference_mode()
    def logits(self, sequences: Sequence[Prompt], nudge: float = 0.0) -> list[Tensor]:
        """fp32 logits [T, V] of every sequence of ids and pictures; nudge: as of Forward."""
        forward = Forward(_maths(self._plan), self._value, int8=self._int8, nudge=nudge)
        return [logits.float() for logits in forward.logits(sequences)]

    def _read(self, name: str) -> Tensor:
        assert isinstance(self._source, HfSource)
        return self._source.tensor(name)

    def _value(self, name: str) -> Tensor:
        """A tensor as the forward wants it; a norm as what it multiplies by."""
        if self._plan.specs[name].kind == "ternary":
            codes, scale = self.projection(name)
            return codes.double() * scale
        value = self._read(name)
        if self._plan.config.model_type == "qwen3_5_text":
            return self._hybrid(name, value)
        # Gemma's norms store it less 1; of those inside projections their values say it
        gemma = self._plan.config.model_type == "gemma3_text" and isinstance(self._source, HfSource)
        if not gemma or not name.endswith("norm.weight"):
            return value
        inside = name.endswith(".rms_norm.weight")
        return value.double() + (not inside or bool(value.float().median() < 0.5))

    def _hybrid(self, name: str, value: Tensor) -> Tensor:
        """A dense tensor of a hybrid as published: norms as what they multiply by.

        A checkpoint stores them less 1, but for that of a gate; MLX's converter, which makes the
        convolutions' middle axis the last, adds the 1. Without convolutions the file says whose
        converter wrote it.
        """
        if name.endswith("conv1d.weight"):
            return value.reshape(len(value), 1, -1)
        if not name.endswith("norm.weight") or name.endswith("linear_attn.norm.weight"):
            return value
        net = self._plan.config.delta_net
        if net is not None:
            taps = self._read(f"model.layers.{net.layers[0]}.linear_attn.conv1d.weight")
            return value if taps.shape[-1] == 1 else value.double() + 1
        assert isinstance(self._source, HfSource)
        by_mlx = self._source.checkpoint.framework == "mlx"
        return value if by_mlx else value.double() + 1


def _maths(plan: Plan) -> Maths:
    c, factors = plan.config, plan.config.scalings
    whole = rotary(c)
    net = c.delta_net
    exponents = torch.arange(c.head_dim // 2, dtype=torch.float64) / (c.head_dim // 2)
    local = (factors.local_theta or 1.0) ** -exponents, 1.0
    sub_norm_eps = c.rms_norm_eps if c.sub_norm_eps is None else c.sub_norm_eps
    return Maths(
        layers=c.num_hidden_layers,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        activation=c.hidden_act,
        eps=c.rms_norm_eps,
        rope=[
            local if layer in factors.local else (whole.inv_freq, whole.attention_factor)
            for layer in range(c.num_hidden_layers)
        ],
        attention=c.attention_scale,
        windows=c.windows,
        sub_norm_eps=sub_norm_eps if c.sub_norms else None,
        linear_norm_eps=c.linear_norm_eps if c.linear_norms else None,
        qk_norm=c.qk_norm,
        post_norms=c.post_norms,
        biases=c.biases,
        bias_is_scaled=plan.scheme.bias_is_scaled,
        group_scales=plan.scheme.storage in (Storage.TERNARY, Storage.GGUF),
        embedding=factors.embedding,
        residual=factors.residual,
        logits=factors.logits,
        tied=c.tie_word_embeddings,
        delta_net=None
        if net is None
        else DeltaNet(net.layers, net.key_heads, net.value_heads, net.key_dim, net.value_dim),
        output_gate=c.output_gate,
        sections=c.rope_sections or (),
        blocks=dict(c.rotation.blocks) if c.rotation else {},
        plain=c.rotation.plain if c.rotation else (),
    )


def _unpack_quarters(packed: Tensor) -> Tensor:
    """uint8 [N/4, K] -> int8 [N, K]: lane i of the bytes is the i-th quarter of the rows."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1, 1)
    codes = (packed.unsqueeze(0) >> shifts) & 3
    return codes.view(-1, packed.shape[1]).to(torch.int8) - 1


def _ternarise(masters: Tensor) -> tuple[Tensor, float]:
    """fp32 [N, K] -> (codes, absmean), with the mean taken in double precision."""
    absmean = max(float(masters.abs().mean(dtype=torch.float64)), 1e-5)
    codes = (masters * (1.0 / torch.tensor(absmean, dtype=torch.float32))).round().clamp(-1, 1)
    return codes.to(torch.int8), absmean


# A GGUF file, decoded a second time ---------------------------------------------------------------

_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 1 << 20
_Q2_BLOCKS = {"Q2_0": 64, "Q2_0_128": 128, "PQ2_0": 128}


class GgufOracle(PlainOracle):
    """The file as a reference: projections as fp32 values, and the logits of a plain forward."""

    name = "plain fp64 forward of the file, decoded a second time"

    def __init__(self, source: GgufSource, *, int8_activations: bool = True) -> None:
        super().__init__(source, int8_activations=int8_activations)
        self._gguf = source

    def _read(self, name: str) -> Tensor:
        if name.startswith("model.rotation."):
            return self._signs(int(name.split(".")[2]))
        info, gguf = self._gguf.infos[name], self._gguf
        values = _values(info.type.name, gguf.reader.data(info.name), info.shape, gguf.i2s_layout)
        return self._by_groups(name, values.view(info.shape))

    def _signs(self, width: int) -> Tensor:
        """Of the width's part of all signs, which follow one another."""
        keys = self._gguf.reader.metadata
        sizes, values = (keys.get(f"prism.hadamard.sign_{name}") for name in ("widths", "values"))
        if values is None or sizes is None:
            return torch.ones(width)
        parts = torch.from_numpy(values.astype(np.float32)).split(sizes.tolist())
        return parts[sizes.tolist().index(width)]

    def _by_groups(self, name: str, values: Tensor) -> Tensor:
        """Value heads of a hybrid put beside those that share their key head."""
        net, module = self._gguf.plan.config.delta_net, name.removesuffix(".weight")
        inside = module.rpartition("linear_attn.")[2] if "linear_attn." in module else ""
        if net is None or inside in ("", "norm"):
            return values
        rotation = self._gguf.plan.config.rotation
        if inside == "out_proj":
            if rotation is not None and module not in rotation.plain:
                return values
            heads = values.view(len(values), -1, net.key_heads, net.value_dim)
            return heads.transpose(1, 2).reshape(values.shape)
        keep = 2 * net.keys if inside in ("in_proj_qkv", "conv1d") else 0
        heads = values[keep:].reshape(net.value_heads // net.key_heads, net.key_heads, -1)
        rest = heads.transpose(0, 1).reshape(values[keep:].shape)
        return torch.cat([values[:keep], rest])

    def _hybrid(self, name: str, value: Tensor) -> Tensor:
        if name.endswith("A_log"):
            return value.double().neg().log()
        return value.reshape(len(value), 1, -1) if name.endswith("conv1d.weight") else value

    def projection(self, weight_name: str) -> tuple[Tensor, Tensor]:
        """(codes int8 [N, K], the scale of every weight f32 [N, K])."""
        gguf, values = self._gguf, self._read(weight_name)
        info = gguf.infos[weight_name]
        if gguf.plan.scheme.assumed and info.type.name in _DENSE:
            reject("gguf-verify", "projections that are ternary in the file", "masters")
        exact = gguf.exact_scales.get(info.name)
        if exact is not None:
            values = values.sign() * exact
        if scale_name(weight_name) in gguf.infos:
            values = values * float(self._read(scale_name(weight_name)))
        if gguf.architecture.permuted and weight_name.endswith(PERMUTED):
            n, k = values.shape
            half = gguf.plan.config.head_dim // 2
            values = values.view(-1, half, 2, k).transpose(1, 2).reshape(n, k)
        return values.sign().to(torch.int8), values.abs()


def _values(kind: str, data: Any, shape: tuple[int, ...], layout: str) -> Tensor:
    if kind in _DENSE:
        return torch.from_numpy(data.copy()).view(_DENSE[kind]).float()
    if kind == "I2_S":
        return torch.from_numpy(_i2s_values(data, shape, layout))
    if kind in _Q2_BLOCKS:
        return torch.from_numpy(_q2_values(data, _Q2_BLOCKS[kind]))
    if kind == "PTQ1_0":
        return torch.from_numpy(_ptq1_values(data))
    try:
        import gguf
    except ImportError:
        reject("gguf-package", "the gguf package for --verify", "none", install("gguf"))
    number = gguf.GGMLQuantizationType[kind]
    rows = data.reshape(shape[0], -1)
    return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(rows, number)))


def _i2s_values(data: Any, shape: tuple[int, ...], layout: str) -> Any:
    """For every weight of the stream its byte and bits, as Microsoft's quantiser places them."""
    n, k = shape
    scale = np.frombuffer(data[n * k // 4 :][:4].tobytes(), dtype="<f4")[0]
    out = np.empty(n * k, dtype=np.float32)
    for begin in range(0, n * k, _CHUNK):
        i = np.arange(begin, min(begin + _CHUNK, n * k))
        if layout == "c":
            byte, lane = i // (4 * k) * k + i % k, i // k % 4
        else:
            block = 128 if layout == "a" else 64
            byte, lane = i // block * (block // 4) + i % (block // 4), i % block // (block // 4)
        codes = (data[byte] >> (6 - 2 * lane).astype(np.uint8)) & 3
        out[i] = (codes.astype(np.float32) - 1) * scale
    return out


def _ptq1_values(data: Any) -> Any:
    """For every weight of a block its byte, and how many digits of that byte come before its own.

    A byte b stands for the fraction b / 256, whose first ternary digits are the codes.
    """
    blocks = data.reshape(-1, 28)
    j = np.arange(128)
    byte = np.where(j < 80, j % 16, np.where(j < 120, 16 + j % 8, 24 + j % 2))
    place = np.where(j < 80, j // 16, np.where(j < 120, (j - 80) // 8, (j - 120) // 2))
    scales = blocks[:, 26:].copy().view("<f2").astype(np.float32)
    out = np.empty((len(blocks), 128), dtype=np.float32)
    for begin in range(0, len(blocks), _CHUNK // 128):
        part = slice(begin, begin + _CHUNK // 128)
        scaled = blocks[part, byte].astype(np.int64) * 3 ** (place + 1)
        out[part] = (scaled // 256 % 3 - 1) * scales[part]
    return out


def _q2_values(data: Any, block: int) -> Any:
    record = np.dtype([("d", "<f2"), ("q", "u1", (block // 4,))])
    blocks = np.frombuffer(data.tobytes(), dtype=record)
    out = np.empty((len(blocks), block), dtype=np.float32)
    for lane in range(4):
        codes = (blocks["q"] >> np.uint8(2 * lane)) & np.uint8(3)
        out[:, lane::4] = (codes.astype(np.float32) - 1) * blocks["d"].astype(np.float32)[:, None]
    return out
