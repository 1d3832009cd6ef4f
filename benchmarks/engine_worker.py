"""The process of another engine: `python -m benchmarks.engine_worker NAME MODEL THREADS`.

Builds a random model of the dimensions of the dummy MODEL in memory or in a temporary file, says
{"ready": true}, then answers every line on stdin ("decode", "prefill N") with {"done": true} once
the work is done. An error is {"error": text}. It must not know our kernels.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.process import answer
from bitnet_ops.dummy import model as dummy


class WorkerEngine(Protocol):
    def decode(self) -> None: ...

    def prefill(self, tokens: int) -> None: ...


class Litespark:
    """litespark_inference.torchless on packed weights made here; its int8 head."""

    # Its AVX2 product returns without computing anything above (1.0.3, LSPK_AVX2_MAX_T).
    MAX_TOKENS = 64

    def __init__(self, model: str, threads: int, folder: Path) -> None:
        import numpy as np
        from litespark_inference.torchless import model as parts
        from litespark_inference.torchless import runtime

        c = dummy.config(model)
        random = np.random.default_rng(0)
        hidden, inner = c.hidden_size, c.intermediate_size
        kv = c.num_key_value_heads * c.head_dim

        def projection(n: int, k: int) -> Any:
            packed = random.integers(0, 256, (n, -(-k // 4)), dtype=np.uint8)
            packed &= 0b10101010  # every field 0 or 2: valid codes
            sums = np.zeros(n, dtype=np.int32)
            return parts.PackedProjection(packed, sums, 0.02, in_features=k, out_features=n)

        def norm_weight(n: int) -> Any:
            return np.full(n, 0x3F80, dtype=np.uint16)  # 1.0 in bfloat16

        layers = [
            parts.PackedLayer(
                q_proj=projection(hidden, hidden),
                k_proj=projection(kv, hidden),
                v_proj=projection(kv, hidden),
                o_proj=projection(hidden, hidden),
                gate_proj=projection(inner, hidden),
                up_proj=projection(inner, hidden),
                down_proj=projection(hidden, inner),
                input_norm=norm_weight(hidden),
                post_attn_norm=norm_weight(hidden),
                attn_sub_norm=norm_weight(hidden),
                ffn_sub_norm=norm_weight(inner),
            )
            for _ in range(c.num_hidden_layers)
        ]
        config = parts.BitNetConfig(
            hidden_size=hidden,
            num_layers=c.num_hidden_layers,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            intermediate_size=inner,
            vocab_size=c.vocab_size,
            max_position_embeddings=4096,
            rms_norm_eps=c.rms_norm_eps,
            rope_theta=c.rope_theta,
        )
        self._model = parts.PackedBitNetModel(
            config=config,
            embed_tokens=None,
            final_norm=norm_weight(hidden),
            layers=layers,
            embed_int8=random.integers(-127, 128, (c.vocab_size, hidden), dtype=np.int8),
            embed_scale=np.full(c.vocab_size, 0.01, dtype=np.float32),
        )
        self._runtime = runtime
        self._state = self._fresh(256)

    def _fresh(self, room: int) -> Any:
        return self._runtime.init_state(self._model, room)

    def decode(self) -> None:
        if self._state.pos >= 250:
            self._state = self._fresh(256)
        self._runtime.forward_one(self._model, self._state, 1)

    def prefill(self, tokens: int) -> None:
        prompt = [i % self._model.config.vocab_size for i in range(tokens)]
        state, maximum = self._fresh(tokens + 1), self.MAX_TOKENS
        for at in range(0, tokens, maximum):
            self._runtime.forward_prefill(self._model, state, prompt[at : at + maximum])


class LlamaCpp:
    """llama.cpp through llama-cpp-python on a file of random TQ2_0 weights."""

    def __init__(self, model: str, threads: int, folder: Path) -> None:
        import llama_cpp

        from benchmarks.engine_gguf import write_random

        path = folder / "random.gguf"
        write_random(dummy.config(model), path)
        self._llama = llama_cpp.Llama(
            str(path), n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def decode(self) -> None:
        if self._llama.n_tokens >= 128:
            self._llama.reset()
        self._llama.eval([1])

    def prefill(self, tokens: int) -> None:
        self._llama.reset()
        self._llama.eval([1 + i % 256 for i in range(tokens)])


ENGINES: dict[str, Callable[[str, int, Path], WorkerEngine]] = {
    "litespark": Litespark,
    "llama-cpp": LlamaCpp,
}


def main(name: str, model: str, threads: int) -> None:
    with tempfile.TemporaryDirectory(prefix="bitnet-ops-engine-") as folder:
        try:
            engine = ENGINES[name](model, threads, Path(folder))
            answer(ready=True)
            for line in sys.stdin:
                what, *rest = line.split()
                if what == "decode":
                    engine.decode()
                else:
                    engine.prefill(int(rest[0]))
                answer(done=True)
        except Exception as error:  # the parent has no other way to learn of it
            answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
