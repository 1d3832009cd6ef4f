"""SGLang and vLLM behind one face: their linear classes, and how each is started.

What a claim needs to know of an engine stands here, so that the claims are written once. Imported
in the engine's environment; the engine itself is imported inside methods, for a worker process
starts it under `if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Run:
    """A checkpoint served by the engine: what is counted, how often a layer or a forward."""

    checkpoint: str  # a name that claims_serving.py makes
    counted: str  # "apply": our linear method, `calls` a layer; "step": the decoder, one a forward
    calls: int
    options: dict[str, Any]
    prompts: int = 8
    tokens: int = 48
    kinds: str = ""  # the beginning of what our calls must have seen


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class SGLang:
    name = "sglang"
    runs = {
        # The linear method, in our model class for BitNet, with our paged attention.
        "linear method": Run("packed", "apply", 4, {"dtype": "float32"}, kinds="paged_attention"),
        "whole decoder": Run("converted", "step", 1, {"dtype": "float32"}),
        # The other stored form, in transformers' model, in the dtype that servers use.
        "bfloat16": Run(
            "online", "apply", 7, {"dtype": "bfloat16", "model_impl": "transformers"}, 4, 24
        ),
    }
    # Checkpoints of every kind, by linears of ours a layer: 0 for one op a forward. "NAME-bin" is
    # the converted model. Bonsai has scales for groups of weights: no quantisation method there.
    families = {
        **{"bitnet": 4, "llama": 4, "qwen3": 4},
        **{f"{name}-bin": 0 for name in ("bitnet", "llama", "qwen3", "bonsai")},
    }
    kinds_options = {"dtype": "float32", "kv_cache_dtype": "bfloat16"}
    kinds_kv_dtype = "bfloat16"
    ranks_option = "tp_size"
    settings = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.1,
        "max_total_tokens": 2048,
        "max_running_requests": 4,
        "context_length": 256,
        "skip_server_warmup": True,
        "log_level": "warning",
    }

    def load_plugins(self) -> bool:
        """Through the entry points alone; whether the method was known before."""
        methods = importlib.import_module("sglang.srt.layers.quantization").QUANTIZATION_METHODS
        before = "bitnet" in methods
        importlib.import_module("sglang.srt.plugins").load_plugins()
        return before

    def start(self) -> None:
        """What the linear classes ask for in a process without an engine."""
        from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel

        init_distributed_environment(
            backend="gloo", world_size=1, rank=0, local_rank=0,
            distributed_init_method=f"tcp://127.0.0.1:{free_port()}",
        )  # fmt: skip
        if "tensor_model_parallel_size" in inspect.signature(initialize_model_parallel).parameters:
            initialize_model_parallel(1)
            return
        from sglang.srt.runtime_context import get_parallel  # since 0.5.21 widths are stated there

        names = "tp_size moe_ep_size pp_size attn_dp_size attn_cp_size moe_dp_size attn_dcp_size"
        widths = dict.fromkeys([*names.split(), "shared_experts_tp_size"], 1)
        get_parallel().override_permanently(**widths)
        initialize_model_parallel()

    def config_class(self):
        return importlib.import_module("sglang.srt.layers.quantization").get_quantization_config(
            "bitnet"
        )

    def linear(self, kind: str, *args, rank: int = 0, ranks: int = 1, **options):
        """One of the engine's linears as rank `rank` of `ranks` makes it."""
        module = importlib.import_module("sglang.srt.layers.linear")
        made = getattr(module, kind)
        if kind == "ReplicatedLinear":
            return made(*args, **options)
        if "tp_rank" in inspect.signature(made).parameters:
            return made(*args, tp_rank=rank, tp_size=ranks, **options)
        group = module._LogicalGroup(rank, ranks)  # since 0.5.22
        with mock.patch.object(module, "_resolve_linear_group", lambda *_: group):
            return made(*args, **options)

    @contextlib.contextmanager
    def dummy_weights(self):
        """As under --load-format dummy."""
        context = importlib.import_module("sglang.srt.runtime_context")
        with mock.patch.object(context, "get_model", lambda: mock.Mock(load_format="dummy")):
            yield

    def initialize_dummy(self, layer) -> None:
        module = importlib.import_module("sglang.srt.model_loader.weight_utils")
        module.initialize_dummy_weights(layer)

    # In a worker process.

    def environment(self, ranks: int) -> dict[str, str]:
        return {"BITNET_OPS_SGLANG_ATTENTION": "1"}

    def open(self, checkpoint: str, **options) -> Any:
        """The engine, in processes of its own."""
        import sglang

        from bitnet_ops.integrations.sglang import launch

        # As the launcher does: SGLang's other models left out, whose import takes half of a start,
        # and the processors shared out.
        ranks = options.get(self.ranks_option, 1) * options.get("dp_size", 1)
        architectures = launch.architectures(Path(checkpoint))
        wanted = launch.environment(os.environ, architectures, ranks)
        names = ("SGLANG_DISABLED_MODEL_ARCHS", "SGLANG_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
        os.environ.update({name: wanted[name] for name in names if name in wanted})
        return sglang.Engine(model_path=checkpoint, **{**self.settings, **options})

    def generate(self, engine: Any, prompts: list, tokens: int) -> list[tuple[int, list[int]]]:
        """(length of the prompt, greedy tokens) of texts or lists of ids."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        texts = isinstance(prompts[0], str)
        asked = {"prompt": prompts} if texts else {"input_ids": prompts}
        answers = engine.generate(**asked, sampling_params=sampling)
        return [(a["meta_info"]["prompt_tokens"], list(a["output_ids"])) for a in answers]

    def close(self, engine: Any) -> None:
        engine.shutdown()


class VLLM:
    name = "vllm"
    transformers = {"model_impl": "transformers"}
    stored_head = {"additional_config": {"bitnet_head_format": "stored"}}
    runs = {
        # transformers' model in vLLM, which fuses q, k and v, and gate and up.
        "linear method": Run("packed", "apply", 4, {"dtype": "float32", **transformers}),
        "whole decoder": Run("packed", "step", 1, {"dtype": "float32", **stored_head}),
        "bfloat16": Run("online", "step", 1, {"dtype": "bfloat16"}, 4, 24),
    }
    families: dict[str, int] = {}
    kinds_options = {"dtype": "float32"}
    kinds_kv_dtype = "float32"
    ranks_option = "tensor_parallel_size"
    settings = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 16}

    def load_plugins(self) -> bool:
        methods = importlib.import_module(
            "vllm.model_executor.layers.quantization"
        ).QUANTIZATION_METHODS
        before = "bitnet" in methods
        importlib.import_module("vllm.plugins").load_general_plugins()
        return before

    def start(self) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config

        self._config = set_current_vllm_config(VllmConfig())
        self._config.__enter__()

    def config_class(self):
        module = importlib.import_module("vllm.model_executor.layers.quantization")
        return module.get_quantization_config("bitnet")

    def linear(self, kind: str, *args, rank: int = 0, ranks: int = 1, **options):
        module = importlib.import_module("vllm.model_executor.layers.linear")
        with (
            mock.patch.object(module, "get_tensor_model_parallel_rank", lambda: rank),
            mock.patch.object(module, "get_tensor_model_parallel_world_size", lambda: ranks),
        ):
            return getattr(module, kind)(*args, **options)

    @contextlib.contextmanager
    def dummy_weights(self):
        from vllm.config import get_current_vllm_config

        load = get_current_vllm_config().load_config
        with mock.patch.object(load, "load_format", "dummy"):
            yield

    def initialize_dummy(self, layer) -> None:
        module = importlib.import_module("vllm.model_executor.model_loader.weight_utils")
        for tensor in layer.state_dict().values():
            module.initialize_single_dummy_weight(tensor)

    def environment(self, ranks: int) -> dict[str, str]:
        """As `bitnet-ops vllm` sets it: all cores, none of them spinning, on a shared machine."""
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        usual = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
        return {**usual, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}

    def open(self, checkpoint: str, **options) -> Any:
        import vllm

        return vllm.LLM(model=checkpoint, **{**self.settings, **options})

    def generate(self, engine: Any, prompts: list, tokens: int) -> list[tuple[int, list[int]]]:
        import vllm

        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        if not isinstance(prompts[0], str):
            prompts = [{"prompt_token_ids": ids} for ids in prompts]
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        return [(len(a.prompt_token_ids), list(a.outputs[0].token_ids)) for a in answers]

    def close(self, engine: Any) -> None:
        pass  # it ends with the process


ENGINES = {"sglang": SGLang, "vllm": VLLM}


def chosen() -> SGLang | VLLM:
    """The engine of this environment."""
    return ENGINES[os.environ["BITNET_PROOF_ENGINE"]]()
