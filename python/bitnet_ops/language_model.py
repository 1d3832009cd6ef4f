"""LanguageModel: a converted model with its tokenizer, and text in, text out; `load` opens one.

    import bitnet_ops
    lm = bitnet_ops.load()                       # the embedded demo model; or load("my-model/")
    print(lm.generate("In the beginning", max_new_tokens=40))

It binds formats, models, tokenizer and engine; the maths is in models/, the loop in engine.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bitnet_ops import cache_files
from bitnet_ops.chat_history import RunIds, without_oldest_turn
from bitnet_ops.config import ModelConfig
from bitnet_ops.embedding import embed
from bitnet_ops.engine import Engine, Generation, Limits, Run, Session, Timing
from bitnet_ops.formats import sglbitnt
from bitnet_ops.head import DEFAULT_HEAD_FORMAT, check_head_format
from bitnet_ops.loading import load_tensors
from bitnet_ops.lora import Adapter, apply_adapter, read_adapter
from bitnet_ops.model_contents import model_config
from bitnet_ops.models import Decoder, build
from bitnet_ops.obtain import LoadError, convert_again, obtain
from bitnet_ops.sampling import SamplingParams
from bitnet_ops.tokenizer import StreamDecoder, Tokenizer, TokenizerError
from bitnet_ops.untrusted import UntrustedFileError, read_json_object

DEMO_DIR = Path(__file__).parent / "data" / "demo"
GENERATION_CONFIG = "generation_config.json"


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.float32,
    weight_format: str = "auto",
    head_format: str = DEFAULT_HEAD_FORMAT,
    cache: bool | str | os.PathLike[str] | None = None,
    convert: bool = True,
    lora: str | os.PathLike[str] | None = None,
) -> LanguageModel:
    """Open a model.

    Args:
        path: a directory with model.bin, or a .bin file; its tokenizer files lie beside it. Or what
            `convert` takes: a Hugging Face checkpoint folder, a GGUF file, or a Hugging Face id
            "org/name" (with huggingface_hub; a path that exists wins). None is the demo model that
            travels in the package.
        dtype: of the activations inside the layers, float32 or bfloat16.
        kv_dtype: of the KV caches, float32, bfloat16 or int8.
        weight_format: how ternary weights lie in memory: "2bit", "1.6bit", "canonical" (the file's
            own rows, mapped) or "auto", the fastest known, which is "2bit". Results are the same.
            "2bit" and "1.6bit" fit the kernels in use now: after forcing another instruction set,
            load again.
        head_format: of the output head, and of the embedding where it is tied: "int8", "int4",
            "bf16", "float32", or "stored", as the file has it.
        cache: keep the prepared form of the model in a file, which makes later loads faster: True
            (in bitnet_ops in the user's cache directory, or where BITNET_OPS_CACHE says), a
            directory, False, or None: if BITNET_OPS_CACHE is set. Files there are safe to delete.
        convert: convert what is no converted model, once: the result is kept in the cache directory
            (for cache=None too, as for True). False refuses it.
        lora: a PEFT directory whose LoRA adapter runs beside the ternary projections; None is none.
            Its projections, and with them single tokens, run part by part instead of fused.
    Returns the LanguageModel.
    Raises LoadError, hub.HubError, convert.ConvertError, formats.sglbitnt.SglbitntError,
    config.UnsupportedModelError, models.TensorError, lora.LoraError or tokenizer.TokenizerError:
    one line that names what is wrong.
    """
    adapter = None if lora is None else read_adapter(lora)
    found = obtain(DEMO_DIR if path is None else path, convert=convert, cache=cache)
    form = dtype, kv_dtype, weight_format, head_format
    prepared_in = cache_files.directory(cache)
    try:
        return _open(found.file, *form, prepared_in, adapter)
    except sglbitnt.SglbitntError as error:
        if found.source is None:
            raise
        found = convert_again(found, error)
    return _open(found.file, *form, prepared_in, adapter)


def _open(
    file: Path,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    weight_format: str,
    head_format: str,
    cache: Path | None,
    adapter: Adapter | None,
) -> LanguageModel:
    reader = sglbitnt.Reader(file, check_codes=False)  # load_tensors checks what it reads
    config = model_config(reader)
    if config.embedding_only:  # the embedding is no head, and is read a row a token
        check_head_format(head_format)
        head_format = "stored"
    tensors = load_tensors(reader, config, weight_format, head_format, cache)
    model = build(config, tensors, dtype, check_values=False)
    if adapter is not None:
        apply_adapter(model, adapter)
    folder = file.parent
    tokenizer = Tokenizer.from_dir(folder) if (folder / "tokenizer.json").is_file() else None
    return LanguageModel(model, tokenizer, _stop_ids(folder, config), kv_dtype=kv_dtype, path=file)


def _stop_ids(folder: Path, config: ModelConfig) -> frozenset[int]:
    """eos ids: those of generation_config.json if any (as transformers), else the config's."""
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return frozenset(config.eos_token_ids)
    try:
        value = read_json_object(path).get("eos_token_id")
    except UntrustedFileError as error:
        raise LoadError(f"load: {error}; repair or remove it") from None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < config.vocab_size:
            raise LoadError(
                f"load: expected eos_token_id in {path} to be ids below vocab_size "
                f"{config.vocab_size}, got {value!r}"
            )
    return frozenset(ids or config.eos_token_ids)


@dataclass(frozen=True)
class _Request:
    """The options of one call, checked."""

    params: SamplingParams
    limits: Limits
    stop: tuple[str, ...] = field(default=())


class LanguageModel:
    """A model, its tokenizer (or None) and an engine.

    Attributes: `config`, `model`, `tokenizer`, `engine`, `stop_ids` (end of text), `path`.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        stop_ids: frozenset[int] | None = None,
        *,
        kv_dtype: torch.dtype = torch.float32,
        path: Path | None = None,
    ) -> None:
        self.model, self.path = model, path
        self._tokenizer = tokenizer
        self.engine = Engine(model, kv_dtype=kv_dtype)
        self.stop_ids = frozenset(model.config.eos_token_ids) if stop_ids is None else stop_ids

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises TokenizerError if the model came without one."""
        if self._tokenizer is None:
            raise TokenizerError(
                f"tokenizer: expected tokenizer.json beside {self.path}, got none; copy it from "
                "the original checkpoint, or use token ids: `model` and `engine` need no tokenizer"
            )
        return self._tokenizer

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt; ids pass through."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def generate(self, prompt: str | Sequence[int], **options: Any) -> str:
        """Continue `prompt` (text or token ids) and return the continuation alone.

        Options, all neutral by default: max_new_tokens=128, temperature=0 (greedy), top_k=0,
        top_p=1, min_p=0, repetition_penalty=1, seed=None (see sampling.SamplingParams); stop=(),
        texts that end the answer and are left out of it; ignore_eos=False.
        """
        return "".join(self.stream(prompt, **options))

    def stream(self, prompt: str | Sequence[int], **options: Any) -> TextStream:
        """As `generate`, but an iterator over pieces of text as they come; see TextStream."""
        request = self._request(**options)
        run = self.engine.start([self.encode(prompt)], request.params, request.limits)
        return TextStream(run, self.tokenizer, request.stop)

    def generate_batch(self, prompts: Sequence[str | Sequence[int]], **options: Any) -> list[str]:
        """As `generate` for several prompts at once; each answer is what it would be alone."""
        request = self._request(**options)
        streams = self._stream_batch([self.encode(p) for p in prompts], request)
        return ["".join(s) for s in streams]

    def embed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
    ) -> torch.Tensor:
        """Vectors of length 1 for texts (or token ids), f32 [number of texts, hidden_size].

        The hidden state of a text's last token after the last norm, as embedding models are trained
        to be read; their tokenizer.json says which token ends a text. One text may be given alone:
        still one row. `dimensions` keeps the first ones only. Cosines are products: `a @ b.T`.
        """
        given = [texts] if isinstance(texts, str) else list(texts)
        return embed(self.model, [self.encode(text) for text in given], dimensions)

    def chat(self, **options: Any) -> Conversation:
        """A conversation through the model's chat template; options as for `generate`.

        Raises tokenizer.ChatTemplateError at the first message if the model has no template.
        """
        return Conversation(self, self._request(**options))

    def _request(
        self,
        *,
        max_new_tokens: int = 128,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        **sampling: Any,
    ) -> _Request:
        if self.config.embedding_only:
            raise LoadError(
                "generate: expected a model with an output head, got an embedding model; use embed"
            )
        try:
            params = SamplingParams(**sampling)
        except TypeError:
            known = "max_new_tokens, stop, ignore_eos, " + ", ".join(vars(SamplingParams()))
            raise TypeError(
                f"generate: expected options among {known}, got {list(sampling)}"
            ) from None
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(s, str) and s for s in stops):
            raise ValueError(f"generate: expected stop to be non-empty texts, got {stop!r}")
        ids = frozenset() if ignore_eos else self.stop_ids
        return _Request(params, Limits(max_new_tokens, ids), stops)

    def _stream_batch(self, prompts: list[list[int]], request: _Request) -> list[list[str]]:
        run = self.engine.start(prompts, request.params, request.limits)
        texts = [_StopText(self.tokenizer, request.stop) for _ in prompts]
        pieces: list[list[str]] = [[] for _ in prompts]
        for row, token in run:
            pieces[row].append(texts[row].push(token))
            if texts[row].stopped:
                run.cancel(row, "stop")
        for text, out in zip(texts, pieces, strict=True):
            out.append(text.finish())
        return pieces


class TextStream:
    """Pieces of text as a run produces them, whole characters only.

    Attributes, up to date at any time: `generation` (token ids, finish reason, seed) and `timing`.
    """

    def __init__(self, run: Run, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._run, self._text = run, _StopText(tokenizer, stop)
        self._iterator = self._pieces()

    @property
    def generation(self) -> Generation:
        return self._run.generations[0]

    @property
    def timing(self) -> Timing:
        return self._run.timing

    def __iter__(self) -> Iterator[str]:
        return self._iterator

    def _pieces(self) -> Iterator[str]:
        for row, token in self._run:
            if piece := self._text.push(token):
                yield piece
            if self._text.stopped:
                self._run.cancel(row, "stop")
        if piece := self._text.finish():
            yield piece


class _StopText:
    """Text of one row up to the first stop text, which never shows, not even in part."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._decoder, self._stop = StreamDecoder(tokenizer), stop
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        return self._release(self._decoder.push(token), end=False)

    def finish(self) -> str:
        return "" if self.stopped else self._release(self._decoder.finish(), end=True)

    def _release(self, piece: str, end: bool) -> str:
        text = self._held + piece
        found = [at for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = 0 if end else max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Conversation:
    """Messages and the cache that holds them: only what is new is run.

    `messages` is the history, a list of {"role", "content"}; it may be edited between turns. The
    oldest turns leave it when the model's context is full: `dropped` says how many messages the
    newest turn cost.
    """

    def __init__(self, lm: LanguageModel, request: _Request) -> None:
        self._lm, self._request = lm, request
        self._session: Session = lm.engine.session()
        self._known = RunIds(lm.tokenizer)
        self.messages: list[Mapping[str, str]] = []
        self.last: TextStream | None = None  # the newest answer, for its timing
        self.dropped = 0

    def say(self, content: str) -> Iterator[str]:
        """Add a user's message and stream the answer, which joins the history when it ends.

        An answer that is broken off joins as far as it came; a message that cannot be run is
        taken back.
        """
        messages, ids = self._fitting([*self.messages, {"role": "user", "content": content}])
        run = self._session.start(ids, self._request.params, self._request.limits)
        self.dropped = len(self.messages) + 1 - len(messages)
        self.messages[:] = messages
        self.last = TextStream(run, self._lm.tokenizer, self._request.stop)
        return self._answer(self.last, ids)

    def _fitting(
        self, messages: list[Mapping[str, str]]
    ) -> tuple[list[Mapping[str, str]], list[int]]:
        """The newest of `messages` that leave room for an answer, and their ids.

        Once something has to go, half of the context is made free: what is left stands at other
        positions and has to be run again, which must not happen at every turn.
        """
        context = self._lm.config.max_position_embeddings
        room = min(self._request.limits.max_new_tokens, context // 4)
        ids = self._known.encode(messages)
        most = context - room if len(ids) <= context - room else context // 2
        while len(ids) > most and (fewer := without_oldest_turn(messages)) is not None:
            messages, ids = fewer, self._known.encode(fewer)
        return messages, ids

    def _answer(self, stream: TextStream, prompt: list[int]) -> Iterator[str]:
        pieces: list[str] = []
        try:
            for piece in stream:
                pieces.append(piece)
                yield piece
        finally:
            answer = "".join(pieces)
            self._known.ran(prompt, answer, stream.generation.token_ids)
            self.messages.append({"role": "assistant", "content": answer})
