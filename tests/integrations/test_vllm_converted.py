"""Converted models in vLLM: hybrids over one pool of pages, against a stand-in of vLLM.

Oracle: the model alone over its own cache. The real vLLM runs them in tests/engines.
"""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
import torch

import bitnet_ops
import bitnet_ops.integrations.vllm as plugin
import engine_surfaces
import hf_writer
import hybrids
from bitnet_ops.convert import convert
from bitnet_ops.integrations import CheckpointError
from bitnet_ops.integrations.vllm import serving
from bitnet_ops.nn.kv_cache import KVCache

DEMO = Path(bitnet_ops.__file__).parent / "data" / "demo" / "model.bin"
PAGES = 14


@pytest.fixture
def surface(monkeypatch):
    modules = engine_surfaces.install(monkeypatch, engine_surfaces.vllm())
    plugin.register()
    return modules


@pytest.fixture(scope="module", params=["plain", "square"])
def served(request, tmp_path_factory):
    """(model file, folder for vLLM) of a hybrid."""
    root = tmp_path_factory.mktemp("served")
    made = hybrids.make(request.param)
    hybrids.write_mlx(root / "mlx", made)
    hf_writer.write_tokenizer(root / "mlx", made.sizes.vocab)
    convert(root / "mlx", root / "bin")
    (root / "folder").mkdir()
    file = root / "bin" / "model.bin"
    return file, serving.write_folder(file, root / "folder")


def vllm_config(folder, *, block=64, mode="align", dtype=torch.float32, **cache):
    config = json.loads((folder / "config.json").read_text())
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(hf_config=types.SimpleNamespace(**config), dtype=dtype),
        parallel_config=types.SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        additional_config={"bitnet_head_format": "stored"},
        speculative_config=None,
        cache_config=types.SimpleNamespace(
            **{"cache_dtype": "auto", "block_size": block, "mamba_block_size": block,
               "mamba_cache_mode": mode, "mamba_ssm_cache_dtype": "auto", **cache}
        ),
        compilation_config=types.SimpleNamespace(static_forward_context={}),
    )  # fmt: skip


def make(surface, config):
    """The class that the folder's config.json names, as vLLM's registry finds it."""
    (name,) = config.model_config.hf_config.architectures
    module, _, cls = surface["vllm.model_executor.models"].ModelRegistry.models[name].partition(":")
    return getattr(__import__(module, fromlist=[cls]), cls)(vllm_config=config)


def block_for(model, config):
    """Positions of a block as vLLM chooses them: a layer's keys take no less than "the states"."""
    ((numbers,),) = model.get_mamba_state_shape_from_config(config)
    spec = model.kv.get_kv_cache_spec(config)
    net = model.config.delta_net
    heads = spec.num_kv_heads // (model.config.num_hidden_layers - len(net.layers))
    position = 2 * heads * spec.head_size * spec.dtype.itemsize
    return 64 * -(-4 * numbers // (64 * position))


class Pages:
    """What vLLM's runner does of a hybrid's cache: one pool, pages given out, states copied."""

    def __init__(self, model, config):
        self.model, forward = model, config.compilation_config.static_forward_context
        self.specs = {name: layer.get_kv_cache_spec(config) for name, layer in forward.items()}
        assert list(forward) == [model.kv.name, model.states.name]
        kv, states = self.specs.values()
        page = kv.page_size_bytes
        assert states.page_size_padded == page
        self.memory = torch.full((PAGES, page), 127, dtype=torch.int8)  # not a number
        shape = PAGES, kv.num_kv_heads, kv.block_size, 2 * kv.head_size
        model.kv.bind_kv_cache(self.memory.view(kv.dtype).view(shape))
        model.states.bind_kv_cache(self.memory[:, None, None])
        self.block, self.free = kv.block_size, list(range(1, PAGES))

    def metadata(self, requests, counts):
        ends = torch.tensor([r.done + n for r, n in zip(requests, counts, strict=True)]).int()
        columns = -(-int(ends.max()) // self.block)
        found = {}
        for name, spec in self.specs.items():
            table = torch.zeros(len(requests), columns, dtype=torch.int32)
            for i, r in enumerate(requests):
                pages = r.pages[name]
                while len(pages) * spec.block_size < int(ends[i]):
                    pages.append(self.free.pop())
                    if name == self.model.states.name and len(pages) > 1:  # the state goes on there
                        self.memory[pages[-1]] = self.memory[pages[-2]]
                table[i, : len(pages)] = torch.tensor(pages)
            positions = [
                torch.arange(r.done, end) for r, end in zip(requests, ends.tolist(), strict=True)
            ]
            slots = [
                table[i, at // self.block].long() * self.block + at % self.block
                for i, at in enumerate(positions)
            ]
            begins = torch.tensor([0, *counts]).cumsum(0).int()
            common = types.SimpleNamespace(
                num_reqs=len(requests), num_actual_tokens=sum(counts), query_start_loc=begins,
                seq_lens=ends, block_table_tensor=table, slot_mapping=torch.cat(slots),
            )  # fmt: skip
            layer = self.model.kv if name == self.model.kv.name else self.model.states
            builder = layer.get_attn_backend().get_builder_cls()(spec, [name], None, None)
            found[name] = builder.build(0, common)
        return found, torch.cat(positions)

    def step(self, *new):
        """Hidden states behind the last of the next tokens of (request, how many)."""
        requests, counts = zip(*new, strict=True)
        metadata, positions = self.metadata(requests, list(counts))
        engine_surfaces.ForwardContext.attn_metadata = metadata
        ids = torch.cat([r.ids[r.done : r.done + n] for r, n in new])
        hidden = self.model(ids.int(), positions)
        for r, n in new:
            r.done += n
        return self.model.compute_logits(hidden[torch.tensor(counts).cumsum(0) - 1])


class Request:
    def __init__(self, model, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, 300, (count,), generator=generator)
        self.pages = {model.kv.name: [], model.states.name: []}
        self.done = 0

    def alone(self, decoder):
        cache = KVCache(decoder.config, 1, len(self.ids), torch.float32)
        return decoder(self.ids[None], cache)[0]


@pytest.mark.parametrize("mode", ["align", "none"])
def test_a_hybrid_over_vllms_pages(surface, served, mode):
    file, folder = served
    config = vllm_config(folder, mode=mode)
    model = make(surface, config)
    assert model.is_hybrid and model.supports_mamba_prefix_caching and model.has_inner_state
    model.load_weights([])
    block = block_for(model, config)
    config.cache_config.block_size = block
    config.cache_config.mamba_block_size = block if mode == "align" else 1 << 20
    pages = Pages(model, config)
    first, second = Request(model, block + 9, 1), Request(model, 40, 2)
    own = bitnet_ops.load(file, head_format="stored").model
    truth = {r: r.alone(own) for r in (first, second)}
    for counts in ((block - 3, 33), (5, 1), (1, 6)):  # the first goes on in a second block
        new = list(zip((first, second), counts, strict=True))
        expected = torch.stack([truth[r][r.done + n - 1] for r, n in new])
        assert torch.equal(pages.step(*new), expected)
    assert len(first.pages[model.states.name]) == (2 if mode == "align" else 1)


def test_every_buffer_of_a_state_is_copied_as_a_whole(surface, served):
    model = make(surface, vllm_config(served[1]))
    kind = model.states.mamba_type
    assert len(model.get_mamba_state_copy_funcs({kind})[kind]) == len(
        model.states.get_state_shape()
    )
    copied = surface["vllm.model_executor.layers.mamba.mamba_utils"].get_temporal_copy_spec
    assert set(model.get_mamba_state_copy_func()) == {copied}
    assert model.get_mamba_state_dtype_from_config(None) == (torch.float32,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "expected states of float32, got bfloat16; leave "
                                                "--mamba-ssm-cache-dtype"),
        ({"cache_dtype": "fp8"}, "KV cache of float32 or bfloat16, got torch.uint8"),
        ({"dtype": torch.float16}, "model dtype bfloat16 or float32, got torch.float16"),
    ],
)  # fmt: skip
def test_other_types_are_rejected(surface, served, options, message):
    with pytest.raises(CheckpointError, match=message):
        make(surface, vllm_config(served[1], **options))


def test_drafts_are_refused_by_name(surface, served):
    config = vllm_config(served[1])
    config.speculative_config = types.SimpleNamespace(method="ngram")
    with pytest.raises(CheckpointError, match="no --speculative-config, got 'ngram'; .* serve"):
        make(surface, config)


def generators(seeds):
    return {row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()}


def test_a_seed_gives_the_same_tokens_whatever_is_forgotten(surface, served):
    runner_class = surface["vllm.v1.worker.cpu_model_runner"].CPUModelRunner
    broken = runner_class(generators({1: 5}), [False, True])
    with pytest.raises(RuntimeError, match="CPU Generator does not use offset"):
        broken._bookkeeping_sync()  # vLLM's own
    for _ in range(2):  # a second model in the process changes nothing
        make(surface, vllm_config(served[1]))
    runner = runner_class(generators({1: 5, 2: 6}), [True, True, False])
    first, second = runner._sample()
    runner._bookkeeping_sync()
    assert [*runner.input_batch.generators] == [2, 1]  # all are there still
    found = {row: float(torch.rand(1, generator=g))
             for row, g in runner.input_batch.generators.items()}  # fmt: skip
    assert found[1] == first and found[2] != second


def test_images_have_no_place_in_the_folder(served):
    config = json.loads((served[1] / "config.json").read_text())
    assert config["architectures"] == ["BitnetOpsHybridForCausalLM"]
    assert "vision_config" not in config
    assert not {"mrope_section", "mrope_interleaved"} & config["rope_parameters"].keys()
    assert config["rope_parameters"]["rope_theta"] == hybrids.THETA


def test_a_model_without_states_has_another_class(surface, tmp_path):
    folder = serving.write_folder(DEMO, tmp_path)
    config = vllm_config(folder)
    model = make(surface, config)
    assert not hasattr(model, "is_hybrid")
    assert [*config.compilation_config.static_forward_context] == [model.kv.name]
    model.load_weights([])
    assert model.compute_logits(torch.zeros(1, 256)).shape == (1, model.config.vocab_size)


def test_a_folder_of_others_is_named(surface, served):
    config = vllm_config(served[1])
    del config.model_config.hf_config.bitnet_ops_model
    with pytest.raises(serving.ServingError, match="expected bitnet_ops_model in config.json"):
        make(surface, config)


def test_without_a_tokenizer_no_folder_is_made(served, tmp_path):
    file = tmp_path / "model.bin"
    file.symlink_to(served[0].resolve())
    with pytest.raises(serving.ServingError, match="tokenizer.json beside"):
        serving.write_folder(file, tmp_path)
