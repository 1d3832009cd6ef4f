"""The model class `bitnet_ops` of EleutherAI's lm-evaluation-harness.

    python -m bitnet_ops.evaluation --model bitnet_ops \\
        --model_args path=my-model --tasks arc_easy

is the harness's own command line with the class registered. In Python: import this module, then
`lm_eval.simple_evaluate(model="bitnet_ops", model_args="path=my-model", ...)`.

Texts become tokens as the harness's class `hf` makes them: the tokenizer's own special tokens
unless `add_bos_token` decides, none where the text begins with the token for beginnings. Keys and
values are float32 unless `kv_dtype` says otherwise: an evaluation is about the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from bitnet_ops.errors import BitNetError
from bitnet_ops.generate.scoring import score
from bitnet_ops.generate.text import Completion
from bitnet_ops.language_model import LanguageModel, load

_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}
_MEANINGLESS = {"do_sample", "use_cache", "pad_token_id", "num_beams", "early_stopping"}


class EvaluationError(BitNetError, ValueError):
    """Arguments of the model class, or of a task, that this package cannot follow."""


@register_model("bitnet_ops")
class BitnetOpsLM(TemplateLM):
    """A converted model, checkpoint folder, GGUF file or Hugging Face id (`path`) to evaluate.

    `dtype`, `kv_dtype` (names of torch's types), `weight_format`, `head_format`: as in
    `bitnet_ops.load`; head_format "stored" is the default here, so that what is measured is the
    model as published. `lora`: an adapter's folder. `max_length`: of context and continuation, the
    model's own by default. `enable_thinking`, `chat_template_args` (options of the chat template)
    and `think_end_token` (a text or an id, behind which an answer begins) are those of the
    harness's class `hf`. `batch_size` and `device` are ignored: all requests share the steps of
    one engine, on the CPU, and the harness names "cuda:0" where the user named nothing.
    """

    def __init__(
        self,
        path: str,
        dtype: str = "float32",
        kv_dtype: str = "float32",
        weight_format: str = "auto",
        head_format: str = "stored",
        lora: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        think_end_token: str | int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise EvaluationError(
                "lm_eval: expected model_args among path, dtype, kv_dtype, weight_format, "
                "head_format, lora, max_length, max_gen_toks, add_bos_token, prefix_token_id, "
                "enable_thinking, chat_template_args, think_end_token, got " + ", ".join(unknown)
            )
        self._template_args = _template_args(enable_thinking, chat_template_args)
        self.enable_thinking = bool(self._template_args.get("enable_thinking"))
        if self.enable_thinking and think_end_token is None:
            raise EvaluationError(
                "lm_eval: expected think_end_token beside enable_thinking, got none; name the text "
                "or token id that ends a thought, such as </think>"
            )
        self.lm: LanguageModel = load(
            path,
            dtype=_dtype(dtype),
            kv_dtype=_dtype(kv_dtype),
            weight_format=weight_format,
            use="batch",
            head_format=head_format,
            lora=lora,
        )
        config = self.lm.config
        self.max_length = int(max_length or config.max_position_embeddings)
        self.max_gen_toks = int(max_gen_toks)
        self.kv_dtype = _dtype(kv_dtype)
        self.add_bos_token = add_bos_token
        bos = self.lm.tokenizer.special_tokens.get("bos_token")
        bos_id = self.lm.tokenizer.token_id(bos) if bos else None
        ends = sorted(config.eos_token_ids)
        eos = self.lm.tokenizer.special_tokens.get("eos_token")
        eos_id = self.lm.tokenizer.token_id(eos) if eos else None
        self._eot = eos_id if eos_id is not None else ends[0] if ends else None
        found = next((i for i in (prefix_token_id, bos_id, self._eot) if i is not None), None)
        if found is None:
            raise EvaluationError(
                "lm_eval: expected a model with a token for beginnings or ends, got neither; say "
                "prefix_token_id="
            )
        self._prefix = int(found)
        self._think_end = self._think_end_of(think_end_token)

    @property
    def eot_token_id(self) -> int:
        return self._prefix if self._eot is None else self._eot

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """Under which the harness keeps its cache of requests, prompts as they are rendered."""
        given = json.dumps(self._template_args, sort_keys=True) if self._template_args else ""
        return f"{self.lm.path}{given}"

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.lm.tokenizer.render_chat(
            chat_history, add_generation_prompt, chat_template_kwargs=self._template_args or None
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The model's own template, whatever name is asked for; "" if there is none."""
        return (self.lm.tokenizer.chat_template or "") if chat_template else None

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        if add_special_tokens is None:
            begins = string.startswith(self.lm.tokenizer.decode([self._prefix], False))
            add = True if self.add_bos_token is None else self.add_bos_token
            add_special_tokens = False if begins else add
        return self.lm.tokenizer.encode(string, add_special_tokens)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        if self.enable_thinking:
            raise EvaluationError(
                "lm_eval: expected tasks of answers with enable_thinking, got one that scores "
                "texts; a thought would have to stand before each"
            )
        scored: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return scored

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """(sum of log probabilities, whether greedy decoding says it) of continuations.

        Equal token ids are scored once. Of what is longer than max_length the end is kept.
        """
        given = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise EvaluationError(
                    f"lm_eval: expected continuations of at most {self.max_length} tokens "
                    f"(max_length), got {len(continuation)}"
                )
            ids = (context + continuation)[-(self.max_length + 1) :]
            given.append((tuple(ids), len(ids) - len(continuation)))
        different = list(dict.fromkeys(given))
        sequences, first = [list(ids) for ids, _ in different], [begin for _, begin in different]
        scores = score(self.lm.model, sequences, first, kv_dtype=self.kv_dtype)
        known = {
            key: (float(s.logprobs.double().sum()), bool(s.greedy.all()))
            for key, s in zip(different, scores, strict=True)
        }
        results = [known[key] for key in given]
        for (names, _, _), result in zip(requests, results, strict=True):
            if names is not None:
                self.cache_hook.add_partial("loglikelihood", names, result)
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The sum of log probabilities of whole texts, in windows of max_length."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            found = [make_disjoint_window(pair) for pair in cut]
            windows += [(None, context, continuation) for context, continuation in found]
            counts.append(len(found))
        values = iter(self._loglikelihood_tokens(windows))
        sums = [sum(next(values)[0] for _ in range(count)) for count in counts]
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers up to a stop text; requests with the same settings share the engine's steps."""
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            settings = json.dumps(request.args[1], sort_keys=True, default=str)
            groups.setdefault(settings, []).append(i)
        answers = [""] * len(requests)
        for members in groups.values():
            settings = requests[members[0]].args[1]
            texts = self._answers([requests[i].args[0] for i in members], settings)
            for i, text in zip(members, texts, strict=True):
                answers[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return answers

    def _answers(self, contexts: list[str], settings: dict[str, Any]) -> list[str]:
        wanted = dict(normalize_gen_kwargs(settings, self.max_gen_toks))
        end = self.lm.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        until = handle_stop_sequences(wanted.pop("until", None), eos=end)
        tokens = int(wanted.pop("max_gen_toks"))
        room = self.max_length - tokens
        if room < 1:
            raise EvaluationError(
                f"lm_eval: expected max_gen_toks below max_length {self.max_length}, got {tokens}"
            )
        options = {k: v for k, v in wanted.items() if k in _SAMPLING}
        if unknown := set(wanted) - set(options) - _MEANINGLESS:
            raise EvaluationError(
                f"lm_eval: expected generation settings among {', '.join(sorted(_SAMPLING))}, "
                f"until, do_sample and max_gen_toks, got {', '.join(sorted(unknown))}"
            )
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        # a thought may hold stop texts, which end the answer behind it alone
        stop = [text for text in until if text] if self._think_end is None else []
        found = self.lm.generate_batch(prompts, max_new_tokens=tokens, stop=stop, **options)
        return [self._answer(completion, until) for completion in found]

    def _answer(self, completion: Completion, until: list[str]) -> str:
        """What stands behind the last thought, up to a stop text."""
        text, end = str(completion), self._think_end
        ids = completion.token_ids
        if isinstance(end, int) and end in ids:
            behind = len(ids) - ids[::-1].index(end)
            text = self.lm.tokenizer.decode(ids[behind:]).lstrip()
        return str(postprocess_generated_text(text, until, end if isinstance(end, str) else None))

    def _think_end_of(self, given: str | int | None) -> str | int | None:
        """The id of a token where there is one, for an answer's text leaves special ones out."""
        if given is None or isinstance(given, int):
            return given
        token = int(given) if given.isdecimal() else self.lm.tokenizer.token_id(given)
        return given if token is None else token


def _template_args(thinking: bool | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of the chat template, as the class `hf` joins them."""
    if not isinstance(given or {}, Mapping):
        raise EvaluationError(
            f"lm_eval: expected chat_template_args as a dict, got {given!r}; on the command line "
            """give --model_args as JSON: '{"path": "...", "chat_template_args": {...}}'"""
        )
    return {**(given or {}), **({} if thinking is None else {"enable_thinking": thinking})}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise EvaluationError(
            f"lm_eval: expected a type of torch such as float32 or bfloat16, got {name}"
        )
    return found


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
