"""A converted model as a file: version 1 and 2 alike to whoever loads it, damage found by `load`.

The checkpoints are written by hf_writer.py. What the bytes are is test_sglbitnt2.py's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hf_writer
from bitnet_ops import load
from bitnet_ops.cli.convert import add_arguments, run
from bitnet_ops.convert import convert
from bitnet_ops.formats.sglbitnt import Reader, SglbitntError
from bitnet_ops.language_model import LanguageModel
from bitnet_ops.nn.kv_cache import KVCache
from bitnet_ops.nn.storage import CPU_SPECIFIC, WEIGHT_FORMATS
from hf_families import CASES
from hf_writer import FAMILIES
from isa_control import torch_threads

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """One checkpoint converted to both versions."""
    folder = tmp_path_factory.mktemp("models")
    source = hf_writer.write_checkpoint(folder / "source", FAMILIES["llama-bitlinear"])
    for version in (1, 2):
        convert(source, folder / f"v{version}", format_version=version)
    return {version: folder / f"v{version}" / "model.bin" for version in (1, 2)}


def logits(lm: LanguageModel) -> torch.Tensor:
    return lm.model(TOKENS, KVCache(lm.config, 1, 8, torch.float32))


def test_both_versions_hold_the_same(models: dict[int, Path]) -> None:
    one, two = (Reader(models[version]) for version in (1, 2))
    assert (one.version, two.version) == (1, 2)
    assert one.config == two.config and list(one.tensors) == list(two.tensors)
    for name, info in one.tensors.items():
        assert torch.equal(one.tensor(name), two.tensor(name))
        assert info.scale == two.tensors[name].scale


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("head_format", ["stored", "int8", "float32"])
def test_both_versions_give_the_same_logits(
    models: dict[int, Path], weight_format: str, head_format: str
) -> None:
    one, two = (
        logits(load(models[version], weight_format=weight_format, head_format=head_format))
        for version in (1, 2)
    )
    assert torch.equal(one, two) and float(one.abs().max()) > 0


def test_dense_tensors_are_used_where_the_file_has_them(models: dict[int, Path]) -> None:
    lm = load(models[2], head_format="stored", weight_format="canonical")
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [
        range(*(int(end, 16) for end in line.split()[0].split("-")))
        for line in maps
        if line.endswith(str(models[2]))
    ]
    matrices = [lm.model.head.weight, lm.model.model.embed_tokens.weight]
    matrices.append(lm.model.get_buffer("model.layers.0.mlp.down_proj.weight"))
    for matrix in matrices:
        assert any(matrix.data_ptr() in addresses for addresses in ranges)
    assert lm.model.head.weight.data_ptr() % 64 == 0


def test_group_scales_through_every_layout(tmp_path: Path) -> None:
    """The values of a matrix with several scales are another test's business (test_families.py)."""
    source = hf_writer.write_checkpoint(tmp_path / "source", CASES["trilm-blocks"].family)
    convert(source, tmp_path / "out")
    with Reader(tmp_path / "out" / "model.bin") as reader:
        kinds = {info.scale_kind for info in reader.tensors.values()}
    assert "group" in kinds
    expected = logits(load(tmp_path / "out", weight_format="canonical"))
    for weight_format in CPU_SPECIFIC:
        lm = load(tmp_path / "out", weight_format=weight_format)
        assert torch.equal(logits(lm), expected)


@pytest.mark.parametrize(
    ("name", "head_format"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "stored"),
        ("model.layers.1.input_layernorm.weight", "stored"),
        ("lm_head.weight", "stored"),
        ("lm_head.weight", "int8"),
        ("model.embed_tokens.weight", "int8"),
    ],
)
@pytest.mark.parametrize("weight_format", ["auto", "canonical"])
def test_one_flipped_bit_anywhere_is_found_at_loading(
    models: dict[int, Path], tmp_path: Path, name: str, head_format: str, weight_format: str
) -> None:
    info = Reader(models[2]).tensors[name]
    data = bytearray(models[2].read_bytes())
    data[info.offset + info.nbytes // 2 & ~1] ^= 1  # a low bit: still a code or a finite number
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(SglbitntError) as caught:
        load(tmp_path / "model.bin", head_format=head_format, weight_format=weight_format)
    assert caught.value.code == "data_checksum" and name in str(caught.value)


@pytest.mark.parametrize(("words", "version"), [([], 2), (["--format", "v1"], 1)])
def test_the_command_writes_the_version_asked_for(
    tmp_path: Path, words: list[str], version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    source = hf_writer.write_checkpoint(tmp_path / "source", FAMILIES["bitnet-online"])
    assert run(parser.parse_args([str(source), str(tmp_path / "out"), *words])) == 0
    assert Reader(tmp_path / "out" / "model.bin").version == version
    assert "wrote" in capsys.readouterr().out
