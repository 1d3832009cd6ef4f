"""`bitnet-ops generate [MODEL] PROMPT`: stream a continuation; also the options chat shares.

Text goes to stdout, figures to stderr; --json gives one object on stdout instead.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet_ops import machine
from bitnet_ops.cli.arguments import UsageError, add_json, add_threads, integer, non_empty, number
from bitnet_ops.cli.pictures import (
    about,
    add_image,
    add_picture_arguments,
    check_picture_arguments,
    load_options,
    read_pictures,
    require_tower,
    told,
)
from bitnet_ops.cli.terminal import (
    checked,
    print_json,
    print_text,
    progress_line,
    read_stdin,
    say,
    without_line_end,
)
from bitnet_ops.errors import counted
from bitnet_ops.generate.draft_choice import DEFAULT_SPECULATION, SPECULATION_WORDS
from bitnet_ops.nn.storage import (
    ACTIVATION_FORMATS,
    DEFAULT_KV_TYPE,
    HEAD_FORMATS,
    KV_TYPES,
    WEIGHT_FORMATS,
    current_head_format,
)

if TYPE_CHECKING:
    from bitnet_ops.generate.pictures import Picture
    from bitnet_ops.language_model import LanguageModel, TextStream

# What `load` takes; every command that opens a model says it in these words.
MODEL_HELP = "converted directory, .bin, checkpoint, .gguf, or Hugging Face id"
NEUTRAL = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
# A word that can only be a model: a path by its beginning or its end, or ORG/NAME of a hub.
_LIKE_A_MODEL = re.compile(
    r"(~?/|\.\.?/)\S*|\S+\.(bin|gguf|safetensors)|[\w.-]*[A-Za-z][\w.-]*/[\w.-]*[-\d][\w.-]*"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "bitnet-ops generate [MODEL] PROMPT [options]"
    parser.description = (
        "Continue a text. Prompt and continuation go to stdout; speed, and why it ended, to stderr."
    )
    parser.add_argument(
        "positionals",
        nargs="*",
        metavar="[MODEL] PROMPT",
        help="a model, as --model (default: the demo), and the text (-: stdin)",
    )
    parser.add_argument("-m", "--model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the text to continue, by name")
    add_model_arguments(parser)
    add_sampling_arguments(parser, max_new_tokens=128)
    add_image(add_picture_arguments(parser), "a picture that stands before the text; repeatable")
    add_template_arguments(parser)
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer the text as a user's message, by the chat template",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of text")
    add_json(parser)


def add_model_arguments(parser: argparse.ArgumentParser, *, drafts: bool = True) -> None:
    """Options of `load`; drafts: of a command that generates."""
    group = parser.add_argument_group("model")
    add_threads(group)
    group.add_argument(
        "--kv-dtype",
        choices=tuple(KV_TYPES),
        default=DEFAULT_KV_TYPE,
        metavar="TYPE",
        help=f"default {DEFAULT_KV_TYPE}; "
        + ", ".join(name for name in KV_TYPES if name != DEFAULT_KV_TYPE),
    )
    group.add_argument(
        "--attention",
        metavar="POLICY",
        type=non_empty,
        help="attend to fewer positions: window:256,sinks=4 (default: all)",
    )
    group.add_argument(
        "--sparsity",
        dest="activation_sparsity",
        metavar="POLICY",
        type=non_empty,
        help="leave zeros of MLPs out: auto, threshold:0.02, top_k:0.1 (default: none)",
    )
    group.add_argument(
        "--kv-cache-mb",
        type=number("above 0", lambda v: v > 0),
        metavar="MB",
        help="the most memory for keys and values (default: a quarter)",
    )
    group.add_argument(
        "--weight-format",
        choices=WEIGHT_FORMATS,
        default="auto",
        metavar="FORMAT",
        help=f"ternary weights: {', '.join(WEIGHT_FORMATS)} (default auto)",
    )
    group.add_argument(
        "--cache",
        metavar="DIR",
        type=non_empty,
        help="of conversions (auto, the default: $BITNET_OPS_CACHE, ~/.cache)",
    )
    group.add_argument(
        "--no-convert",
        dest="convert",
        action="store_false",
        help="reject what is not converted, instead of converting it once",
    )
    group.add_argument("--lora", metavar="DIR", help="PEFT directory with a LoRA adapter to run")
    group.add_argument(
        "--head-format",
        choices=tuple(HEAD_FORMATS),
        type=current_head_format,
        default="int8",
        metavar="FORMAT",
        help=f"default {', '.join(HEAD_FORMATS)}",
    )
    group.add_argument(
        "--activation-format",
        choices=("auto", *ACTIVATION_FORMATS),
        default="auto",
        metavar="FORMAT",
        help=f"grouped weights: auto, {', '.join(ACTIVATION_FORMATS)} (default auto)",
    )
    if drafts:
        group.add_argument(
            "--no-draft",
            dest="draft",
            action="store_false",
            help="leave the model's draft head, if it has one, unread",
        )


def add_sampling_arguments(
    parser: argparse.ArgumentParser, max_new_tokens: int, default: str = "greedy"
) -> None:
    group = parser.add_argument_group(f"sampling (default: {default})")
    add: Callable[..., Any] = group.add_argument
    add(
        "-n",
        "--max-new-tokens",
        "--max-tokens",
        type=integer(0),
        default=max_new_tokens,
        metavar="N",
        help=f"default {max_new_tokens}",
    )
    at_least_0 = number("at least 0", lambda v: v >= 0)
    share = number("above 0 and at most 1", lambda v: 0 < v <= 1)
    floor = number("from 0 to 1", lambda v: 0 <= v <= 1)
    penalty = number("above 0", lambda v: v > 0)
    # None where nothing was given: see sampling_options
    add("--temperature", "--temp", type=at_least_0, metavar="T", help="0 is greedy (default)")
    add("--top-k", type=integer(0, 2**31 - 1), metavar="K", help="0 keeps all (default)")
    add("--top-p", type=share, metavar="P", help="1 keeps all (default)")
    add("--min-p", type=floor, metavar="P", help="0 keeps all (default)")
    add("--repetition-penalty", type=penalty, metavar="R", help="1 is none (default)")
    openai = number("from -2 to 2", lambda v: -2 <= v <= 2)
    add("--frequency-penalty", type=openai, metavar="F", help="0 is none (default)")
    add("--presence-penalty", type=openai, metavar="F", help="0 is none (default)")
    add(
        "--logit-bias",
        action="append",
        default=[],
        type=_token_and_bias,
        metavar="ID=B",
        help="add B, -100 to 100, to the logit of token ID; repeatable",
    )
    add(
        "--logprobs",
        type=integer(0, 20),
        metavar="N",
        help="log probability of each token and N others, in JSON, on stderr",
    )
    add_speculation(parser)
    add("--seed", type=integer(0, 2**63 - 1), metavar="S", help="makes sampling repeatable")
    add(
        "--stop",
        action="append",
        default=[],
        type=non_empty,
        metavar="TEXT",
        help="end before TEXT; repeatable",
    )


def add_template_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        help="think before the answer, or not",
    )
    parser.add_argument(
        "--reasoning-effort",
        type=non_empty,
        metavar="WORD",
        help="how long to think: low, medium, high, ... as the model knows them",
    )


def template_options(args: argparse.Namespace) -> dict[str, Any]:
    """The chat_template_kwargs that the command line gives."""
    names = ("enable_thinking", "reasoning_effort")
    given = {name: getattr(args, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def check_template_options(args: argparse.Namespace, *, used: bool, remedy: str) -> None:
    """Reject options of a template where none is `used`."""
    for name in template_options(args):
        if not used:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{args.command}: expected {option} only with a chat template; {remedy}"
            )
    checked(args.reasoning_effort or "", "--reasoning-effort")


def _token_and_bias(text: str) -> tuple[int, float]:
    expected = "expected ID=B, a token id and a number from -100 to 100"
    token, _, bias = text.partition("=")
    try:
        parsed = integer(0, 2**31 - 1)(token), number("", lambda v: -100 <= v <= 100)(bias)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{expected}, got {text!r}") from None
    return parsed


def add_speculation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--speculation",
        type=_speculation,
        default=DEFAULT_SPECULATION,
        metavar="HOW",
        help="draft tokens; same text: auto (default), ngram, head, off, N",
    )


def _speculation(text: str) -> str | int:
    if text in SPECULATION_WORDS:
        return text
    try:
        return integer(0)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(SPECULATION_WORDS)} or an integer at least 0, got {text!r}"
        ) from None


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of LanguageModel.stream that the command line gives."""
    for text in args.stop:
        checked(text, "--stop")
    given = {name: getattr(args, name) for name in NEUTRAL}
    return {
        "max_new_tokens": args.max_new_tokens,
        **{name: NEUTRAL[name] if value is None else value for name, value in given.items()},
        "seed": args.seed,
        "logit_bias": dict(args.logit_bias) or None,
        "logprobs": args.logprobs,
        "stop": args.stop,
        "speculation": args.speculation,
    }


def makers_sampling(lm: LanguageModel, args: argparse.Namespace) -> dict[str, float]:
    """How the makers of the model sample, where the command line does not say otherwise."""
    stated = lm.generation.sampling.items()
    return {name: value for name, value in stated if getattr(args, name) is None}


def generation_note(lm: LanguageModel, args: argparse.Namespace, *, used: bool) -> None:
    """Say once what generation_config.json asks for and whether that is done.

    Not of the demo: the first line that a newcomer reads is no remark about a file.
    """
    if lm.is_demo:
        return
    found = makers_sampling(lm, args)
    asks = ", ".join(f"{name} {value:g}" for name, value in found.items())
    parts = []
    if asks and used:
        parts.append(f"sampling as it says, {asks} (--temperature 0 is greedy)")
    elif asks:
        flags = (f"--{name.replace('_', '-')} {value:g}" for name, value in found.items())
        parts.append(f"{asks} is not used; chat does, and {' '.join(flags)} here")
    if lm.generation.ignored:
        parts.append(f"ignored: {', '.join(lm.generation.ignored)}")
    if parts:
        say(f"note: generation_config.json: {'; '.join(parts)}")


def model_and_prompt(args: argparse.Namespace) -> tuple[str | None, str]:
    """MODEL (None: the demo) and PROMPT ("-": stdin) of the positionals, -m and -p."""
    model, prompt, words = args.model, args.prompt, list(args.positionals)
    if prompt is None and words:
        prompt = words.pop()
        if model is None and not words and looks_like_a_model(prompt):
            raise UsageError(
                f"generate: expected a prompt, got only the model {prompt}; add the text to "
                f'continue: bitnet-ops generate {prompt} "..." (- reads it from stdin), or say '
                f"-p {prompt} if that is the text"
            )
    if model is None and words:
        model = words.pop()
        if not looks_like_a_model(model) and prompt is not None and Path(prompt).is_dir():
            raise UsageError(
                f"generate: expected MODEL before PROMPT, got the folder {prompt} behind "
                f"{model!r}; exchange them, or say -m and -p"
            )
    if words:
        raise UsageError(
            f"generate: expected [MODEL] PROMPT, got {words[0]!r} as well; put the prompt in quotes"
        )
    if prompt is None:
        raise UsageError(
            "generate: expected [MODEL] PROMPT, got no prompt; add the text to continue "
            "(- reads it from stdin)"
        )
    return model, prompt


def looks_like_a_model(word: str) -> bool:
    """Whether `word`, given alone, is a model rather than a text to continue."""
    try:
        exists = word != "" and Path(word).expanduser().exists()  # Path("") is the folder here
    except (OSError, ValueError, RuntimeError):  # too long for a name, a NUL, no such user
        exists = False
    return exists or bool(_LIKE_A_MODEL.fullmatch(word))


def open_model(
    path: str | None, args: argparse.Namespace, *, use: str = "batch", **memory: Any
) -> LanguageModel:
    """Load the model under the thread and cache options; remarks about it go to stderr.

    use, memory: as other options of `load`.
    """
    import torch

    from bitnet_ops.language_model import load
    from bitnet_ops.nn.kv_config import KV_DTYPES

    if args.threads is not None:
        torch.set_num_threads(args.threads)
        if args.threads > (maximum := machine.cpus_available()):
            cpus = counted(maximum, "CPU")
            say(f"note: {args.threads} threads on {cpus} wait for each other; try -t {maximum}")
    with progress_line() as progress:
        progress("loading the model")
        lm = load(
            path,
            kv_dtype=KV_DTYPES[args.kv_dtype],
            weight_format=args.weight_format,
            use=use,
            head_format=args.head_format,
            activation_format=args.activation_format,
            attention=args.attention,
            activation_sparsity=args.activation_sparsity,
            cache=None if args.cache == "auto" else args.cache,
            convert=args.convert,
            lora=args.lora,
            kv_cache_mb=args.kv_cache_mb,
            draft=_reads_draft_head(args),
            **{**load_options(args), **memory},
        )
    for note in lm.config.notes:
        say(f"note: {note}")
    return lm


def _reads_draft_head(args: argparse.Namespace) -> bool:
    """Whether a command may use the model's draft head."""
    return getattr(args, "draft", False) and args.speculation not in ("ngram", "off", 0)


def check_draft(args: argparse.Namespace) -> None:
    """Reject --speculation head beside --no-draft."""
    if args.speculation == "head" and not args.draft:
        raise UsageError(
            f"{args.command}: expected --speculation head or --no-draft, got both; choose one of "
            "them"
        )


def use_of(args: argparse.Namespace) -> str:
    """What one conversation or text is to `load`: "batch" where drafts are insisted on.

    "auto" drafts where that pays, and most steps of most texts have one token.
    """
    return "single" if args.speculation in ("off", "auto", 0) else "batch"


def encoded(lm: LanguageModel, prompt: str) -> list[int]:
    """The ids of a prompt; a note on stderr where it says itself what the tokenizer adds."""
    ids = lm.encode(prompt)
    if len(ids) > 1 and ids[0] == ids[1] == lm.config.bos_token_id:
        token = lm.tokenizer.id_to_token(ids[0])
        say(f"note: the prompt begins with {token} twice: the tokenizer adds it; leave it out")
    return ids


def figures(stream: TextStream) -> str:
    """One line for people: prompt, time to first token, speed."""
    import torch

    from bitnet_ops import _runtime

    t = stream.timing
    reused = f" ({t.reused_tokens} cached)" if t.reused_tokens else ""
    speed = f", {t.decode_tokens_per_s:.1f} tokens/s" if t.decoded_tokens else ""
    counts = stream.generation.drafts
    right = f", {counts.accepted} of {counted(counts.drafted, 'draft')} right"
    drafts = right if counts.drafted else ""
    return (
        f"prompt {counted(t.prompt_tokens, 'token')}{reused} | "
        f"first token {1000 * t.first_token_s:.1f} ms | "
        f"{counted(t.new_tokens, 'token')}{speed}{drafts} | {_runtime.isa()}, "
        f"{counted(torch.get_num_threads(), 'thread')}"
    )


def keep_draft_remark() -> None:
    """Leave it to `note_draft_head` to print the engine's remark, which would stand in a text."""
    from bitnet_ops.generate.draft_report import LOG

    if not LOG.handlers:  # then Python itself prints warnings
        LOG.addHandler(logging.NullHandler())


def note_draft_head(lm: LanguageModel) -> bool:
    """Say that the model's draft head is mostly wrong, where it is; whether it was said."""
    if (remark := lm.engine.draft_remark) is not None:
        say(f"note: {remark}")
    return remark is not None


def why_it_ended(lm: LanguageModel, stream: TextStream, options: dict[str, Any]) -> str:
    """Why the text ends where it does, for people."""
    reason, text = stream.generation.finish_reason, stream.generation.stop_reason
    context = lm.config.max_position_embeddings
    reasons = {
        "": "it was interrupted",
        "stop": f"the stop text {text!r}" if isinstance(text, str) else "the model's own end",
        "length": f"the limit of {counted(options['max_new_tokens'], 'token')} (-n)",
        "context": f"the model's context of {counted(context, 'token')} is full",
    }
    return f"ended: {reasons.get(reason, reason)}"


def logprob_objects(lm: LanguageModel, stream: TextStream) -> list[dict[str, Any]]:
    """For each token of an answer what --logprobs tells, as JSON has it."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = lm.tokenizer.decode([token_id], skip_special_tokens=False)
        return {"token_id": token_id, "token": text, "logprob": logprob}

    return [
        {
            **entry(one.token_id, one.logprob),
            "top_logprobs": [entry(*pair) for pair in one.top_logprobs],
        }
        for one in stream.generation.logprobs
    ]


def print_logprobs(lm: LanguageModel, stream: TextStream) -> None:
    """A line of JSON for each token of an answer, if they were asked for."""
    for one in logprob_objects(lm, stream):
        say(json.dumps(one))  # ASCII alone, whatever the tokens hold


def check(args: argparse.Namespace) -> None:
    """Make MODEL and PROMPT of what was given."""
    args.model, args.prompt = model_and_prompt(args)
    checked(args.prompt, "prompt")
    sampling_options(args)
    check_draft(args)
    check_template_options(args, used=args.chat, remedy="add --chat")
    check_picture_arguments(args)


def run(args: argparse.Namespace) -> int:
    model, prompt = args.model, args.prompt
    if prompt == "-":
        prompt = without_line_end(read_stdin())
    options = sampling_options(args)
    pictures = read_pictures(args)
    began = time.perf_counter()
    lm = open_model(model, args, use=use_of(args))
    load_s = time.perf_counter() - began
    keep_draft_remark()
    seen = _seen(lm, pictures, quiet=args.json)
    parts, shown = _parts_and_shown(lm, prompt, pictures, args)
    generation_note(lm, args, used=False)
    stream = lm.stream(parts, ignore_eos=args.ignore_eos, **options)
    if args.json:
        text = "".join(stream)
        print_json({**_report(lm, args, prompt, text, stream, load_s), **seen})
        note_draft_head(lm)
        return 0
    status = _print_stream(shown, stream)
    print_logprobs(lm, stream)
    demo = "the embedded demo | " if model is None else ""
    ended = why_it_ended(lm, stream, options)
    tower = f"pictures {seen['pictures_s']:.1f} s | " if seen else ""
    say(f"{demo}load {load_s:.1f} s | {tower}{figures(stream)} | {ended}")
    note_draft_head(lm)
    return status


def _seen(lm: LanguageModel, pictures: Sequence[Picture], *, quiet: bool) -> dict[str, Any]:
    """Run the tower on pictures; what a report says of them, nothing where there are none.

    Raises ImageError for a model that reads texts alone.
    """
    if not pictures:
        return {}
    require_tower(lm)
    found = [about(lm, picture) for picture in pictures]
    for one in found if not quiet else ():
        say(f"picture {told(one)}")
    began = time.perf_counter()
    for picture in pictures:
        lm.image(picture)
    return {"images": found, "pictures_s": time.perf_counter() - began}


def _parts_and_shown(
    lm: LanguageModel, prompt: str, pictures: Sequence[Picture], args: argparse.Namespace
) -> tuple[Sequence[Any], str]:
    """The prompt to run, and what of its text is shown before the continuation."""
    from bitnet_ops.generate.run_ids import RunIds

    if not args.chat:
        images = [lm.image(picture) for picture in pictures]
        return (["", *images, prompt] if images else encoded(lm, prompt)), prompt
    content: list[Any] = [{"type": "image", "image": picture} for picture in pictures]
    content.append({"type": "text", "text": prompt})
    reader = lm.images
    known = RunIds(lm.tokenizer, template_options(args), () if reader is None else reader.token_ids)
    ids = known.encode([{"role": "user", "content": content if pictures else prompt}])
    if reader is None or not pictures:
        return ids, known.opening
    return reader.expand(ids, known.pictures), known.opening


def _print_stream(prompt: str, stream: TextStream) -> int:
    status, shown = 0, False
    try:
        for piece in stream:
            print_text(piece if shown else prompt + piece)
            shown = True  # the prompt waits for the first token, so that an error stands alone
    except KeyboardInterrupt:
        status = 130
    except Exception:
        if shown:
            print_text("", end="\n")  # what came is a line, also in a file
        raise
    print_text("" if shown else prompt, end="\n")
    return status


def _report(
    lm: LanguageModel,
    args: argparse.Namespace,
    prompt: str,
    text: str,
    stream: TextStream,
    load_s: float,
) -> dict[str, Any]:
    import torch

    from bitnet_ops import _runtime

    t, g = stream.timing, stream.generation
    options = sampling_options(args)
    return {
        "model": str(lm.path),
        "prompt": prompt,
        "text": text,
        "token_ids": g.token_ids,
        **({} if args.logprobs is None else {"logprobs": logprob_objects(lm, stream)}),
        "finish_reason": g.finish_reason,
        "stop_reason": g.stop_reason,  # the stop text, or the id that ends a text
        "sampling": {**options, "seed": g.seed},
        "prompt_tokens": t.prompt_tokens,
        "new_tokens": t.new_tokens,
        "load_s": load_s,
        "time_to_first_token_s": t.first_token_s,
        "decode_s": t.decode_s,
        "decode_tokens_per_s": t.decode_tokens_per_s,
        "drafts": g.drafts.as_dict(),
        "isa": _runtime.isa(),
        "threads": torch.get_num_threads(),
        "kv_dtype": args.kv_dtype,
        "attention": args.attention,
        "activation_sparsity": args.activation_sparsity,
        "weight_format": lm.model.weight_format,
        "weight_format_reason": None if lm.weight_choice is None else lm.weight_choice.reason,
        "head_format": lm.model.head.head_format,
        "lora": args.lora,
    }
