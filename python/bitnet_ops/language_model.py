"""LanguageModel: a converted model with its tokenizer, and text in, text out; `load` opens one.

    import bitnet_ops
    lm = bitnet_ops.load()                       # the embedded demo model; or load("my-model/")
    print(lm.generate("In the beginning", max_new_tokens=40))

It binds formats, models, tokenizer and engine; the maths is in models/, the loop in engine.py.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitnet_ops.arguments import check_flag, check_kind, check_megabytes, check_path, shown
from bitnet_ops.config import ModelConfig
from bitnet_ops.config.sparsity import read_sparsity
from bitnet_ops.conversions import convert_again, resolve
from bitnet_ops.errors import counted
from bitnet_ops.formats import sglbitnt
from bitnet_ops.generate.chat import (
    THINK,
    check_options_kind,
    whole_answer,
    without_oldest_turn,
)
from bitnet_ops.generate.constraint import Constraint, Thoughts
from bitnet_ops.generate.draft_choice import check_draft_head
from bitnet_ops.generate.engine import Engine, Limits, Run, check_adapter, token_ids
from bitnet_ops.generate.grammar import Grammars
from bitnet_ops.generate.images import NO_TOWER, Images, open_images, picture_file
from bitnet_ops.generate.pictures import Picture
from bitnet_ops.generate.prompt import PromptRows
from bitnet_ops.generate.run_ids import RunIds
from bitnet_ops.generate.scoring import Score, embed, score
from bitnet_ops.generate.text import (
    Completion,
    GenerateOptions,
    Options,
    StopText,
    TextStream,
    parse_options,
)
from bitnet_ops.generate.tokenizer import Tokenizer, TokenizerError
from bitnet_ops.loading.draft import attach_draft_head
from bitnet_ops.loading.generation_config import GenerationConfig, read_generation_config
from bitnet_ops.loading.resolve import LoadError
from bitnet_ops.loading.weight_choice import WeightChoice, check_use, choose_for_file
from bitnet_ops.loading.weights import load_model
from bitnet_ops.models import Decoder, dtype_of
from bitnet_ops.nn.kv_config import DEFAULT_KV_DTYPE, kv_dtype_of
from bitnet_ops.nn.lora import Adapter, LoraError, read_adapter
from bitnet_ops.nn.storage import (
    DEFAULT_HEAD_FORMAT,
    check_activation_format,
    check_head_format,
    check_weight_format,
)
from bitnet_ops.vision.decode import ImageLimits
from bitnet_ops.vision.errors import ImageError
from bitnet_ops.vision.sources import image_bytes

if sys.version_info >= (3, 11):
    from typing import Unpack
else:
    from typing_extensions import Unpack  # torch depends on it

Folder = str | os.PathLike[str]
# Of one prompt: a text, token ids, or parts among which pictures stand (LanguageModel.generate).
Prompt = str | Sequence[Any] | Tensor
PictureSource = str | os.PathLike[str] | bytes | Picture  # a file, or what it holds
DEMO_DIR = Path(__file__).parent / "data" / "demo"


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | str = torch.float32,
    kv_dtype: torch.dtype | str = DEFAULT_KV_DTYPE,
    weight_format: str = "auto",
    use: str = "single",
    head_format: str = DEFAULT_HEAD_FORMAT,
    activation_format: str = "auto",
    attention: str | None = None,
    activation_sparsity: str | None = None,
    cache: str | os.PathLike[str] | None = None,
    convert: bool = True,
    lora: Folder | Mapping[str, Folder] | None = None,
    kv_cache_mb: float | None = None,
    prefix_dir: Folder | None = None,
    prefix_dir_mb: float = 4096,
    vision: bool = True,
    image_limits: ImageLimits | None = None,
    mmproj: str | os.PathLike[str] | None = None,
    draft: bool = True,
) -> LanguageModel:
    """Open a model.

    Args:
        path: a directory with model.bin, or a .bin file; its tokenizer files lie beside it. Or what
            `convert` takes: a Hugging Face checkpoint folder, a GGUF file, or a Hugging Face id
            "org/name" (with huggingface_hub; a path that exists wins). None is the demo model that
            travels in the package.
        dtype: of the activations inside the layers, float32 or bfloat16.
        kv_dtype: of the KV caches: torch.float32, torch.bfloat16 (the default: half the memory, no
            measurable loss), torch.float16, torch.int8 (about half of that again),
            torch.float8_e4m3fn or torch.float8_e5m2 (half of bfloat16, and coarser than int8).
            Where results must equal those of a float32 implementation to the last bits, ask for
            float32. Both may be given by their names, "int8" for torch.int8.
        weight_format: how ternary weights lie in memory: "2bit", "1.6bit", "canonical" (the file's
            own rows, mapped) or "auto": "2bit" or "1.6bit", whichever is faster for `use` on this
            machine with the threads that torch has now. `weight_choice` of the result says which
            and why; loading/weight_choice.py has the rule. Results are the same. "2bit" and
            "1.6bit" fit the kernels in use now: after forcing another instruction set, load again.
        use: what "auto" is for: "single", one text after another; "batch", many sequences at once,
            prompts without long answers, drafts, embeddings or scores.
        head_format: of the output head, and of the embedding where it is tied: "int8", "int4",
            "bf16", "float32", or "stored", as the file has it. A matrix that the file holds as
            ternary weights stays what it is in every format.
        activation_format: what ternary weights with scales of groups multiply by: "int8" (one scale
            a token), "int8_group" (one for every 128 features of a token), "int16_group" (16 bits,
            as the heads have them; twice the arithmetic) or "auto", which is "int8_group". Models
            with a scale a matrix or a row, which were trained with it, take "int8" alone.
        attention: which of the earlier positions tokens attend to, such as "window:256,sinks=4":
            less to read, and another result (config/attention.py; docs/guide/attention.md). None:
            all that the model was trained with.
        activation_sparsity: leave out inputs of MLPs' last projections that are 0 while one token
            decodes: "auto" where it pays; results are the same. "threshold:0.02", "top_k:0.5" and
            "adaptive:min_ratio=0.3,max_ratio=0.7" make small ones 0, and results other ones
            (config/sparsity.py; docs/guide/activation-sparsity.md). None: multiply all.
        cache: the directory in which conversions are kept; None is what BITNET_OPS_CACHE names, or
            bitnet_ops in the user's cache directory. Files there are safe to delete.
        convert: convert what is no converted model, once, into the cache directory. False rejects
            it.
        lora: a PEFT directory whose LoRA adapter runs beside the ternary projections, for every
            text; or several by name, of which each call may choose one (`adapter=`). More can be
            added and removed later: `LanguageModel.add_adapter`.
        kv_cache_mb: the most memory, in MiB, for keys and values; None: as Engine decides, by what
            the machine, its container and the process' limits leave.
        prefix_dir, prefix_dir_mb: a directory that keeps keys and values of prompts after a restart
            too, and the most MiB of it; see Engine.
        vision: read pictures, where the model's file has a tower, which is loaded at the first one;
            False: as a model that reads texts alone.
        image_limits: what pictures may cost: bytes, pixels, tokens (`max_tokens`, 1024 of each);
            None: the defaults of vision.decode.ImageLimits.
        mmproj: of a model that is converted now, the GGUF file with its tower for pictures; None:
            the checkpoint's own, or the mmproj file in the folder of a GGUF file.
        draft: read the draft head, where the model's file has one, which guesses tokens for
            `speculation`; False: leave it in the file. Results are the same.
    Returns the LanguageModel.
    Raises LoadError, loading.hub.HubError, convert.ConvertError, config.UnsupportedModelError,
    config.attention.AttentionPolicyError, config.sparsity.ActivationSparsityError,
    formats.sglbitnt.SglbitntError, models.TensorError, lora.LoraError or tokenizer.TokenizerError:
    one line that names what is wrong.
    """
    # Before a model of gigabytes is read, not at its first token.
    dtypes = dtype_of(dtype, "load"), kv_dtype_of(kv_dtype, "load: expected kv_dtype")
    check_weight_format(weight_format)
    check_use(use)
    check_head_format(head_format)
    check_activation_format(activation_format)
    if activation_sparsity is not None:
        read_sparsity(activation_sparsity)
    for what, given in (
        ("a model", path),
        ("cache", cache),
        ("prefix_dir", prefix_dir),
        ("mmproj", mmproj),
    ):
        if given is not None:
            check_path(f"load: expected {what}", given)
    check_flag("load: expected convert", convert)
    if kv_cache_mb is not None:
        check_megabytes("load: expected kv_cache_mb", kv_cache_mb)
    check_megabytes("load: expected prefix_dir_mb", prefix_dir_mb)
    check_flag("load: expected vision", vision)
    check_flag("load: expected draft", draft)
    limits = ImageLimits() if image_limits is None else image_limits
    check_kind("load: expected image_limits as ImageLimits or None", limits, ImageLimits)
    adapters = _read_adapters(lora)
    source = DEMO_DIR if path is None else path
    found = resolve(source, convert=convert, cache=cache, mmproj=mmproj)
    form = *dtypes, head_format, activation_format, attention, activation_sparsity

    def choose(file: Path) -> WeightChoice:
        if weight_format != "auto":
            return WeightChoice(weight_format, "asked for")
        return choose_for_file(file, use, activation_format, cache)

    options = {
        "kv_cache_mb": kv_cache_mb,
        "prefix_dir": prefix_dir,
        "prefix_dir_mb": prefix_dir_mb,
        "image_limits": limits if vision else None,
    }
    try:
        return _open(found.file, choose(found.file), *form, adapters, draft, options)
    except sglbitnt.SglbitntError as error:
        if found.source is None:
            raise
        found = convert_again(found, error)
    return _open(found.file, choose(found.file), *form, adapters, draft, options)


def _open(
    file: Path,
    choice: WeightChoice,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_format: str,
    activation_format: str,
    attention: str | None,
    activation_sparsity: str | None,
    adapters: Mapping[str | None, Adapter],
    draft: bool,
    options: Mapping[str, Any],
) -> LanguageModel:
    formats = choice.weight_format, head_format
    model = load_model(file, dtype, *formats, attention, choice.arena)
    model.set_activation_format(activation_format)
    model.set_activation_sparsity(activation_sparsity)
    for name, adapter in adapters.items():
        model.add_adapter(adapter, name)
    if draft:
        attach_draft_head(model, file, choice.weight_format)
    folder = file.parent
    tokenizer = Tokenizer.from_dir(folder) if (folder / "tokenizer.json").is_file() else None
    generation = read_generation_config(folder, model.config, tokenizer)
    lm = LanguageModel(
        model,
        tokenizer,
        generation.stop_ids,
        kv_dtype=kv_dtype,
        path=file,
        generation=generation,
        **options,
    )
    lm.weight_choice = dataclasses.replace(choice, arena=None)  # the weights' alone now
    return lm


def _read_adapters(lora: Folder | Mapping[str, Folder] | None) -> dict[str | None, Adapter]:
    if lora is None:
        return {}
    if isinstance(lora, Mapping) and not all(isinstance(name, str) for name in lora):
        raise LoraError(f"load: expected lora with names as keys, got {shown(dict(lora))}")
    if not isinstance(lora, Mapping):
        return {None: read_adapter(lora)}
    return {name: read_adapter(folder) for name, folder in lora.items()}


class LanguageModel:
    """A model, its tokenizer (or None) and an engine; `load` makes one.

    Args:
        model, tokenizer: what runs; without a tokenizer prompts are token ids.
        stop_ids: ids that end a text; None: those of the model's config.
        kv_dtype, kv_cache_mb, prefix_dir, prefix_dir_mb: of keys and values, as of `load`.
        path: where the model came from, for messages, and where its tower for pictures is read.
        image_limits: what pictures may cost; None: none are read.
        generation: what its generation_config.json says.
    Attributes: `config`, `model`, `tokenizer`, `engine`, `stop_ids` (end of text), `path`, `images`
    (what reads pictures; None for a model that reads texts alone),
    `weight_choice` (`weight_format` and `reason`; None where `load` did not make it), and
    `generation`, whose `sampling` holds the options that the model's makers sample with: `chat`
    begins from them; the other calls use them where they are given, as
    `lm.generate(text, **lm.generation.sampling)`.
    Any number of threads may share one; a TextStream and a Conversation belong to one thread each.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        stop_ids: frozenset[int] | None = None,
        *,
        kv_dtype: torch.dtype = DEFAULT_KV_DTYPE,
        path: Path | None = None,
        generation: GenerationConfig | None = None,
        kv_cache_mb: float | None = None,
        prefix_dir: Folder | None = None,
        prefix_dir_mb: float = 4096,
        image_limits: ImageLimits | None = None,
    ) -> None:
        who = "LanguageModel: expected"
        check_kind(f"{who} tokenizer as a Tokenizer or None", tokenizer, (Tokenizer, type(None)))
        generation = GenerationConfig() if generation is None else generation
        check_kind(f"{who} generation as a GenerationConfig or None", generation, GenerationConfig)
        self.model, self.generation, self._tokenizer = model, generation, tokenizer
        self.path = None if path is None else check_path(f"{who} path", path)
        limits = (ImageLimits, type(None))
        check_kind(f"{who} image_limits as ImageLimits or None", image_limits, limits)
        self.weight_choice: WeightChoice | None = None
        self.images: Images | None = None
        if self.path is not None and image_limits is not None:
            self.images = open_images(self.path, image_limits)
        self.engine = Engine(
            model,
            kv_dtype=kv_dtype,
            kv_cache_mb=kv_cache_mb,
            prefix_dir=prefix_dir,
            prefix_dir_mb=prefix_dir_mb,
        )
        ends = frozenset(model.config.eos_token_ids)
        self.stop_ids = ends if stop_ids is None else Limits(0, stop_ids).stop_ids

    def __repr__(self) -> str:
        if self.engine.closed:
            return f"LanguageModel({self.path}: closed)"
        kv_dtype = str(self.engine.kv_dtype).removeprefix("torch.")
        tokenizer = "" if self._tokenizer is not None else ", no tokenizer"
        return f"LanguageModel({self.path}: {self.model.summary}, kv {kv_dtype}{tokenizer})"

    def close(self) -> None:
        """Free the memory of the model and its cache, once `prefix_dir` has what waits for it.

        Texts that are being written end where they are, with finish_reason "abort", and an
        EngineThread that owns the engine ends. Whatever is asked for afterwards raises ClosedError;
        a second call does nothing. `with bitnet_ops.load(...) as lm:` closes at its end.
        """
        self.engine.shut_down()
        self.images = None
        self.model = self.engine.model  # type: ignore[assignment]  # what stands in its place

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_demo(self) -> bool:
        """Whether this is the demo model that travels in the package."""
        return self.path is not None and self.path.parent == DEMO_DIR

    @property
    def config(self) -> ModelConfig:
        """The model's: sizes, context, end-of-text ids, under Hugging Face's names."""
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

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Makes grammars of JSON schemas for this model; made at first use, which takes a second.

        Raises GrammarError without the package llguidance, or for a tokenizer without bytes.
        """
        return Grammars(self.tokenizer, self.config.vocab_size, self.stop_ids)

    def add_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Load the LoRA adapter of a PEFT directory, for calls and requests that name it.

        For one thread while no other runs the model. Raises LoraError for one that does not fit,
        and for a name that is taken.
        """
        check_kind("add_adapter: expected a name as text", name, str)
        self.model.add_adapter(read_adapter(folder), name)

    def remove_adapter(self, name: str) -> None:
        """Undo `add_adapter`, once no request uses it. Raises LoraError for an unknown name."""
        check_kind("remove_adapter: expected a name as text", name, str)
        self.model.remove_adapter(name)

    def image(self, source: PictureSource) -> list[int | PromptRows]:
        """A picture as a part of a prompt, as in `lm.generate(["A ", lm.image("cat.png")])`.

        `source`: a file, its bytes, or a Picture. Between the tokens that models are trained with
        stand its rows, f32 [tokens, hidden_size], which are kept for a while: the same picture
        costs nothing soon after. Raises ImageError for what cannot be read, and for a model that
        reads texts alone.
        """
        picture = self._picture(source)
        assert self.images is not None
        return self.images.prompt_of(picture)

    def _picture(self, source: PictureSource) -> Picture:
        self.engine.check_open()
        if self.images is None:
            raise ImageError(*NO_TOWER)
        if isinstance(source, Picture):
            return source
        if isinstance(source, bytes):
            return Picture(image_bytes(source, limits=self.images.limits))
        path = check_path("image: expected a file or bytes", source)
        return picture_file(path, self.images.limits)

    def encode(self, prompt: str | Sequence[int] | Tensor) -> list[int]:
        """Token ids of one prompt: of a text, or ids (a list, a tensor [T] or [1, T]) as they are.

        Raises TypeError for anything else.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, list | tuple) and any(isinstance(p, str) for p in prompt):
            raise TypeError(
                "prompt: expected one text or a list of token ids, got a "
                f"{type(prompt).__name__} of texts; give several prompts to generate_batch"
            )
        return token_ids(prompt)

    def _encode(self, prompt: Prompt) -> Sequence[int | PromptRows]:
        """As `encode`, of a prompt that may have pictures (`image`) or PromptRows among its parts.

        Of these only the first text begins as texts begin.
        """
        if not isinstance(prompt, list | tuple) or not any(map(_has_rows, prompt)):
            return self.encode(prompt)
        found: list[int | PromptRows] = []
        for i, part in enumerate(prompt):
            if isinstance(part, str):
                found += self.tokenizer.encode(part, add_special_tokens=i == 0)
            elif isinstance(part, PromptRows | int):
                found.append(part)
            else:
                found += part if isinstance(part, list | tuple) else token_ids(part)
        return found

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Continue `prompt` (text or token ids) and return the continuation alone, as a str.

        A list of texts and ids is one prompt too where pictures (`image`) or rows of one's own
        (PromptRows) stand among them.

        Options, all neutral by default: max_new_tokens=128, temperature=0 (greedy), top_k=0,
        top_p=1, min_p=0, repetition_penalty=1, seed=None, frequency_penalty=0, presence_penalty=0,
        logit_bias=None, logprobs=None (see sampling.SamplingParams); stop=(), texts that end the
        answer and are left out of it; ignore_eos=False; speculation="auto"; json_schema=None, or a
        JSON schema or pydantic model that the text is to satisfy (see GenerateOptions).
        Why it ended is in the Completion's `finish_reason`, what its tokens' probabilities were in
        `logprobs`. Raises TypeError for an unknown option or another kind of
        prompt, ValueError for a value out of range, engine.PromptError, grammar.GrammarError for a
        schema that cannot be held.
        """
        return self._stream("generate", prompt, options).read()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> TextStream:
        """As `generate`, but an iterator over pieces of text as they come; see TextStream."""
        return self._stream("stream", prompt, options)

    def generate_batch(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]] | Tensor,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """As `generate` for several prompts at once; each answer is what it would be alone."""
        wanted = self._request("generate_batch", options)
        encoded = [self._encode(p) for p in _several("generate_batch", prompts)]
        return self._complete(encoded, wanted)

    def embed(
        self, texts: str | Sequence[str] | Sequence[Sequence[int]], *, dimensions: int | None = None
    ) -> torch.Tensor:
        """Vectors of length 1 for texts (or token ids), f32 [number of texts, hidden_size].

        The hidden state of a text's last token after the last norm, as embedding models are trained
        to be read; their tokenizer.json says which token ends a text. One text may be given alone:
        still one row. `dimensions` keeps the first ones only. Cosines are products: `a @ b.T`.
        """
        given = [texts] if isinstance(texts, str) else _several("embed", texts)
        return embed(self.model, [self.encode(text) for text in given], dimensions)

    def score(
        self, texts: str | Sequence[str] | Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> list[Score]:
        """How probable texts (or token ids) are: for each, its tokens from the second one on.

        A Score has `logprobs` f32 [tokens - 1] and `greedy`, whether each was the most probable;
        perplexity is `score.logprobs.mean().neg().exp()`. Raises PromptError for a text without
        tokens or longer than the context.
        """
        check_adapter(self.model, adapter)
        given = [texts] if isinstance(texts, str) else _several("score", texts)
        ids = [self.encode(text) for text in given]
        return score(self.model, ids, kv_dtype=self.engine.kv_dtype, adapter=adapter)

    def chat(
        self,
        *,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Conversation:
        """A conversation through the model's chat template; options as for `generate`.

        `system`: the system message that it begins with. Options of sampling that are not stated
        are the makers' (`generation.sampling`), as in the terminal's chat and in the server;
        temperature=0 is greedy. With `json_schema` every answer is JSON of it, behind the thoughts
        of a model that thinks. `chat_template_kwargs`: options of the template, such as
        {"enable_thinking": False}. Raises tokenizer.ChatTemplateError at the first message if the
        model has no template, or its template no such option.
        """
        stated: GenerateOptions = {**self.generation.sampling, **options}  # type: ignore[typeddict-item]
        talk = Conversation(self, self._request("chat", stated), chat_template_kwargs)
        talk.set_system(system)
        return talk

    def _request(self, call: str, options: GenerateOptions) -> Options:
        self.engine.check_open()
        if self.config.embedding_only:
            raise LoadError(
                f"{call}: expected a model with an output head, got an embedding model; use embed"
            )
        wanted = parse_options(call, options, self.stop_ids)
        check_draft_head(wanted.max_drafts, self.model, f"{call}: expected speculation")
        check_adapter(self.model, wanted.adapter)
        if wanted.json_schema is not None:
            self.grammars.schema(wanted.json_schema, f"{call}: json_schema")
        return wanted

    def _stream(self, call: str, prompt: Any, options: GenerateOptions) -> TextStream:
        wanted = self._request(call, options)
        run = self._start([self._encode(prompt)], wanted)
        return TextStream(run, self.tokenizer, wanted.stop)

    def _start(
        self, prompts: Sequence[Sequence[Any]], wanted: Options, opening: str | None = None
    ) -> Run:
        """opening: what a chat's prompt has written of the answer; None: it is no chat."""
        constraints: list[Constraint] | None = None
        if wanted.json_schema is not None:
            grammar = self.grammars.schema(wanted.json_schema, "json_schema")
            constraints = [grammar.start() for _ in prompts]
            if opening or (opening is not None and THINK in (self.tokenizer.chat_template or "")):
                texts = self.grammars.texts
                constraints = [Thoughts(texts, grammar.start(), opened=bool(opening))]
        return self.engine.start(
            prompts,
            wanted.params,
            wanted.limits,
            max_drafts=wanted.max_drafts,
            adapter=wanted.adapter,
            constraints=constraints,
        )

    def _complete(self, prompts: Sequence[Sequence[Any]], wanted: Options) -> list[Completion]:
        run = self._start(prompts, wanted)
        texts = [StopText(self.tokenizer, wanted.stop) for _ in prompts]
        pieces: list[list[str]] = [[] for _ in prompts]
        for row, token in run:
            pieces[row].append(texts[row].push(token))
            if texts[row].stopped is not None:
                run.cancel(row, "stop", texts[row].stopped)
        for text, out in zip(texts, pieces, strict=True):
            out.append(text.finish())
        return [
            Completion("".join(out), generation, run.timing)
            for out, generation in zip(pieces, run.generations, strict=True)
        ]


def _has_rows(part: object) -> bool:
    """Whether a part of a prompt is rows, or has some, as a picture has."""
    return isinstance(part, PromptRows) or (
        isinstance(part, list | tuple) and any(isinstance(one, PromptRows) for one in part)
    )


def _several(call: str, prompts: Any) -> list[Any]:
    """The prompts of a call that takes several, so that one alone is not taken to pieces."""
    kind = "one text" if isinstance(prompts, str) else f"a {type(prompts).__name__}"
    if getattr(prompts, "ndim", 0) == 2:  # a tensor or an array: a prompt a row
        return list(prompts)
    if isinstance(prompts, Sequence | Iterator) and not isinstance(prompts, str | bytes):
        several = list(prompts)
        if not any(isinstance(p, int) for p in several):
            return several
        kind += " of integers"
    raise TypeError(
        f"{call}: expected a list of prompts, each a text or token ids, got {kind}; put one "
        "prompt in brackets"
    )


class Conversation:
    """Messages and the cache that holds them: what the new prompt begins with is not run again.

    How much that is, the chat template decides: it may write an answer otherwise than it was made.

    `messages` is the history, a list of {"role", "content"}; it may be edited between turns. An
    answer stands there with its thoughts between <think> and </think>, which the template leaves
    out of later prompts; `opening` is what the prompt itself wrote of the newest one. The oldest
    turns leave it when the model's context is full: `dropped` says how many messages the newest
    turn cost.
    """

    def __init__(
        self,
        lm: LanguageModel,
        request: Options,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if chat_template_kwargs is not None:
            check_options_kind(chat_template_kwargs)
        self._lm, self._request = lm, request
        pictures = () if lm.images is None else lm.images.token_ids
        self._known = RunIds(lm.tokenizer, chat_template_kwargs, pictures)
        self.messages: list[Mapping[str, Any]] = []
        self.last: TextStream | None = None  # the newest answer, for its timing
        self.dropped = 0
        self._again = 0  # how often an answer was asked for once more

    def __repr__(self) -> str:
        return f"Conversation({counted(len(self.messages), 'message')})"

    @property
    def opening(self) -> str:
        return self._known.opening

    def say(self, content: str, images: Sequence[PictureSource] = ()) -> Iterator[str]:
        """Add a user's message and stream the answer, which joins the history when it ends.

        `images`: files of pictures, their bytes, or Pictures, which stand before the text. An
        answer that is broken off joins as far as it came; a message that cannot be run is taken
        back. Raises ImageError for a picture that cannot be read.
        """
        if not isinstance(content, str):
            raise TypeError(f"say: expected a text, got a {type(content).__name__}")
        check_kind("say: expected images as a list of files", images, (list, tuple))
        parts: str | list[dict[str, Any]] = content
        if images:
            pictures = [self._lm._picture(source) for source in images]
            parts = [{"type": "image", "image": picture} for picture in pictures]
            parts.append({"type": "text", "text": content})
        return self._ask([*self.messages, {"role": "user", "content": parts}], self._request)

    def regenerate(self) -> Iterator[str]:
        """Answer the user's newest message once more, in the place of the answer that it has.

        Where the options have a seed, another one is used each time. Raises ValueError before there
        is a message.
        """
        at = max((i for i, m in enumerate(self.messages) if m["role"] == "user"), default=None)
        if at is None:
            raise ValueError("regenerate: expected a message of the user, got none; say one")
        request = self._request
        if request.params.seed is not None:
            self._again += 1
            seed = (request.params.seed + self._again) % 2**63
            params = dataclasses.replace(request.params, seed=seed)
            request = dataclasses.replace(request, params=params)
        return self._ask(self.messages[: at + 1], request)

    def set_system(self, content: str | None) -> None:
        """Let `content` be the system message at the beginning; None: let there be none."""
        if content is not None:
            check_kind("chat: expected system as a text or None", content, str)
        if self.messages and self.messages[0]["role"] == "system":
            del self.messages[0]
        if content is not None:
            self.messages.insert(0, {"role": "system", "content": content})

    def _ask(self, asked: list[Mapping[str, Any]], request: Options) -> Iterator[str]:
        messages, ids = self._fitting(asked)
        prompt: Sequence[Any] = ids
        if self._known.pictures and self._lm.images is not None:
            prompt = self._lm.images.expand(ids, self._known.pictures)
        run = self._lm._start([prompt], request, self.opening)
        self.dropped = len(asked) - len(messages)
        self.messages[:] = messages
        self.last = TextStream(run, self._lm.tokenizer, self._request.stop)
        return self._answer(self.last, ids)

    def _fitting(
        self, messages: list[Mapping[str, Any]]
    ) -> tuple[list[Mapping[str, Any]], list[int]]:
        """The newest of `messages` that leave room for an answer, and their ids.

        Once something has to go, half of the context is made free: what is left stands at other
        positions and has to be run again, which must not happen at every turn.
        """
        context = self._lm.config.max_position_embeddings
        room = min(self._request.limits.max_new_tokens, context // 4)
        ids, tokens = self._encoded(messages)
        maximum = context - room if tokens <= context - room else context // 2
        while tokens > maximum and (fewer := without_oldest_turn(messages)) is not None:
            messages, (ids, tokens) = fewer, self._encoded(fewer)
        return messages, ids

    def _encoded(self, messages: list[Mapping[str, Any]]) -> tuple[list[int], int]:
        """The ids of a prompt, in which a picture is one, and how many tokens it has."""
        ids = self._known.encode(messages)
        if not (pictures := self._known.pictures) or self._lm.images is None:
            return ids, len(ids)
        return ids, len(self._lm.images.padded(ids, pictures))

    def _answer(self, stream: TextStream, prompt: list[int]) -> Iterator[str]:
        pieces: list[str] = []
        try:
            for piece in stream:
                pieces.append(piece)
                yield piece
        finally:
            stream.close()
            answer = "".join(pieces)
            self._known.ran(prompt, answer, stream.generation.token_ids)
            content = whole_answer(self.opening, answer)
            self.messages.append({"role": "assistant", "content": content})
