"""`bitnet-ops bench KIND`: arguments, progress and exit status of the benchmarks.

It must not know how anything is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet_ops.bench.shapes import (
    HEAD_FORMATS,
    KV_DTYPES,
    MODELS,
    USUAL,
    WEIGHT_FORMATS,
    parse_counts,
    parse_shapes,
    parse_words,
)
from bitnet_ops.cli.arguments import UsageError, add_force, add_json
from bitnet_ops.cli.generate import add_speculation
from bitnet_ops.cli.terminal import print_lines, print_result, progress_line
from bitnet_ops.dummy.configs import CONFIGS
from bitnet_ops.errors import counted

if TYPE_CHECKING:
    from bitnet_ops.bench.attention import AttentionSettings
    from bitnet_ops.bench.engine import EngineSettings
    from bitnet_ops.bench.ops import OpsSettings
    from bitnet_ops.bench.run_model import ModelSettings
    from bitnet_ops.bench.serve import ServeSettings
    from bitnet_ops.bench.sparsity import SparsitySettings

# The usual values of an option: of a whole run, and of --quick.
_M = ("1,2,4,8,16,32,64,128,512,2048", "1,4,32")
_COLD_MIB, _SECONDS = (512, 256), (0.4, 0.15)
_PROMPTS, _CONTEXTS, _BATCHES = ("128,512,2048", "128"), ("0,2048,8192", "0"), ("1,2,4,8", "1,4")
_ATTENDED = ("8192,16384,32768", "4096")
_STREAMS, _STREAM_CONTEXTS = ("1,2,4,8,16,32,64", "1,4,16"), ("128,2048", "128")
_SERVED, _RATES, _REQUESTS, _SYSTEM = ("1,4,8,16,32", "1,4"), ("0.5,1", "2"), (40, 10), (512, 64)
_MAX_TOKENS, _MAX_THREADS = 4096, 1024
_DUMMY = "2b-4t"
_FORMATS = "auto+int8"

_OPS = (
    "Time the ops hot (operands in a cache) and cold (operands in memory), alternating with a "
    "read-only pass and with the int8 multiply-add peak; ratio 1.00 is the limit. torch's own "
    "bfloat16 runs beside them. Every result is checked first. Exit status 1 when one is wrong."
)
_MODEL = (
    "Time prefill and decode of a model, or of a synthetic one with random weights, against "
    "reading its bytes and against the int8 peak, both alternating with it."
)
_ATTENTION = (
    "Time attention of new tokens under policies that read fewer positions (docs/guide/"
    "attention.md), alternating with attention to all of them."
)
_SPARSITY = (
    "Time decoding under activation sparsity (docs/guide/activation-sparsity.md), alternating with "
    "products that multiply all inputs, for several shares of zeros."
)
_ENGINE = (
    "Time many requests at once: streams that decode together, against reading the step's bytes "
    "once and against the int8 multiply-adds of its tokens, both alternating with them; and a "
    "queue of mixed requests."
)
_SERVE = (
    "Start `bitnet-ops serve` and ask it over HTTP: equal streams, by turns with the engine alone "
    "(what the server costs), and requests that arrive at random with a shared system prompt. "
    "Answers are compared with those without load; exit status 1 where one differs."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments to `parser`."""
    parser.description = "Measure against limits of this machine, taken in the same process."
    kinds = parser.add_subparsers(
        dest="kind", metavar="ops|model|attention|sparsity|engine|serve", required=True
    )
    for name, text, description, add in (
        ("ops", "every op on model shapes", _OPS, _add_ops_arguments),
        ("model", "prefill and decode of a whole model", _MODEL, _add_model_arguments),
        ("attention", "attention policies", _ATTENTION, _add_attention_arguments),
        ("sparsity", "decode that leaves zeros out", _SPARSITY, _add_sparsity_arguments),
        ("engine", "many requests at once", _ENGINE, _add_engine_arguments),
        ("serve", "a server under load", _SERVE, _add_serve_arguments),
    ):
        kind = kinds.add_parser(name, help=text, description=description)
        kind.set_defaults(_parser=kind)  # who complains of an unknown option
        add(kind)
        kind.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
        kind.add_argument("-t", "--threads", help="thread counts such as 1,2 (default: 1 and all)")
        add_json(kind)
        kind.add_argument("--output", metavar="FILE", help="also write everything to FILE, as JSON")
        add_force(kind, "an earlier report")


def _default(values: tuple[object, object]) -> str:
    return f"(default: {values[0]}; quick: {values[1]})"


def _add_ops_arguments(ops: argparse.ArgumentParser) -> None:
    ops.add_argument(
        "--shapes",
        default="2b-4t",
        help=f"names ({', '.join(MODELS)}) and NxK, separated by commas (default: 2b-4t)",
    )
    ops.add_argument("--m", help=f"tokens of the products {_default(_M)}")
    ops.add_argument(
        "--weight-format",
        default="auto",
        help=f"of {', '.join(WEIGHT_FORMATS)}, separated by commas (default: {USUAL})",
    )
    ops.add_argument(
        "--cold-mib",
        type=int,
        help=f"memory that cold operands cycle through {_default(_COLD_MIB)}",
    )
    ops.add_argument("--seconds", type=float, help=f"time for one row {_default(_SECONDS)}")


def _add_model_arguments(model: argparse.ArgumentParser) -> None:
    model.add_argument(
        "model", nargs="?", metavar="MODEL", help="a converted model (default: a synthetic one)"
    )
    model.add_argument(
        "--dummy", help=f"which synthetic model: {', '.join(CONFIGS)} (default: {_DUMMY})"
    )
    model.add_argument(
        "--formats",
        default=_FORMATS,
        help="pairs WEIGHTS+HEAD of formats with commas between; the first one gets every "
        "measurement. WEIGHTS auto: as generate chooses them; what it measures against gets a "
        f"decode step too (default: {_FORMATS})",
    )
    model.add_argument(
        "--kv-dtype",
        default=KV_DTYPES[0],
        help=f"types of the KV cache, of {', '.join(KV_DTYPES)}, or all; the first one gets every "
        f"measurement, the others one sequence and the prompts (default: {KV_DTYPES[0]})",
    )
    model.add_argument("--attention", metavar="POLICY", help="as of generate (default: none)")
    model.add_argument("--prompts", help=f"tokens of the prompts {_default(_PROMPTS)}")
    model.add_argument("--contexts", help=f"tokens behind which to decode {_default(_CONTEXTS)}")
    model.add_argument("--batches", help=f"sequences decoded together {_default(_BATCHES)}")
    model.add_argument(
        "--image",
        metavar="SIDES",
        help="pixels a side of square pictures, such as 256,512 (of a MODEL with a tower)",
    )


def _add_attention_arguments(attention: argparse.ArgumentParser) -> None:
    add = attention.add_argument
    add("--shapes", help="of 2b-4t, bonsai-1.7b, separated by commas (default: both)")
    add("--contexts", help=f"positions of the sequence {_default(_ATTENDED)}")
    add("--tokens", default="1", help="new ones: 1 is decode, 256 a chunk of a prompt (default: 1)")
    add(
        "--policy", action="append", metavar="POLICY", dest="policies",
        help="as --attention of generate; may be given again (default: one of each kind)",
    )  # fmt: skip
    add("--kv-dtype", default="bfloat16,int8", help="types of the cache (default: bfloat16,int8)")
    add("--check", action="store_true", help="exit status 1 where a policy is too slow")
    add("--plot", metavar="FILE", help="time against context, as FILE.png or .svg")


def _add_sparsity_arguments(sparsity: argparse.ArgumentParser) -> None:
    add = sparsity.add_argument
    add("--dummy", default=_DUMMY, help=f"which synthetic model (default: {_DUMMY})")
    add("--zeros", metavar="SHARES", help="shares of inputs that are 0, such as 0.5,0.9")
    add("--check", action="store_true", help='exit status 1 where "auto" is too slow')
    add("--plot", metavar="FILE", help="speed against zeros, as FILE.png or .svg")


def _add_engine_arguments(engine: argparse.ArgumentParser) -> None:
    engine.add_argument(
        "--dummy",
        default=_DUMMY,
        help=f"which synthetic model: {', '.join(CONFIGS)} (default: {_DUMMY})",
    )
    engine.add_argument(
        "--formats", default=_FORMATS, help=f"WEIGHTS+HEAD formats (default: {_FORMATS})"
    )
    engine.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default=KV_DTYPES[0],
        help=f"type of the KV cache (default: {KV_DTYPES[0]})",
    )
    engine.add_argument("--streams", help=f"numbers of streams {_default(_STREAMS)}")
    engine.add_argument(
        "--contexts", help=f"tokens behind which they decode {_default(_STREAM_CONTEXTS)}"
    )


def _add_serve_arguments(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    add("model", nargs="?", metavar="MODEL", help="as of serve (default: the demo)")
    add("--streams", help=f"numbers of equal streams {_default(_SERVED)}; 0: none")
    add("--rates", help=f"requests that arrive a second {_default(_RATES)}; 0: none")
    add("--requests", type=int, help=f"that arrive at each rate {_default(_REQUESTS)}")
    add("--system-tokens", type=int, help=f"of the shared prompt {_default(_SYSTEM)}")
    add("--prompts", default="16,64,256", help="tokens of prompts, a mix (default: 16,64,256)")
    add("--answers", default="16,64,128", help="tokens of answers, a mix (default: 16,64,128)")
    add("--plot", metavar="FILE", help="times to the first token, as FILE.png or .svg")
    add_speculation(serve)
    add("--seed", type=int, default=0, help="of arrivals and prompts (default: 0)")


def serve_settings(args: argparse.Namespace) -> ServeSettings:
    """The settings that the arguments of `bench serve` ask for; ValueError names a wrong one."""
    from bitnet_ops.bench.serve import ServeSettings

    quick = args.quick
    rates = [float(word) for word in (args.rates or _RATES[quick]).split(",")]
    if not all(0 <= rate <= 1e4 for rate in rates):
        raise ValueError(f"--rates: expected 0 to 10000, got {args.rates}")
    requests = _REQUESTS[quick] if args.requests is None else args.requests
    system = _SYSTEM[quick] if args.system_tokens is None else args.system_tokens
    for option, value, minimum in (("--requests", requests, 1), ("--system-tokens", system, 0)):
        if not minimum <= value <= 100_000:
            raise ValueError(f"{option}: expected {minimum} to 100000, got {value}")
    streams = parse_counts("--streams", args.streams or _SERVED[quick], 512, minimum=0)
    return ServeSettings(
        model=args.model,
        streams=tuple(n for n in streams if n),
        rates=tuple(rate for rate in rates if rate),
        requests=requests,
        system_tokens=system,
        prompt_tokens=parse_counts("--prompts", args.prompts, 16384),
        new_tokens=parse_counts("--answers", args.answers, 16384),
        seed=args.seed,
        speculation=args.speculation,
        options=("-t", args.threads) if args.threads else (),
    )


def _run_serve(args: argparse.Namespace) -> int:
    import torch

    from bitnet_ops.bench import report, serve
    from bitnet_ops.language_model import load

    try:
        settings = serve_settings(args)
        if args.threads:
            torch.set_num_threads(int(args.threads))
        require_output(args.output, replace=args.force)
    except ValueError as error:
        raise UsageError(f"bench serve: {error}") from error
    if args.plot:
        serve.require_plot()
    with progress_line() as progress:
        result = serve.run(settings, lambda: load(args.model, use="batch"), progress)
    print_result(result, serve.lines(result), as_json=args.json)
    if args.output:
        report.write_json(result, args.output, replace=args.force)
    if args.plot:
        serve.plot(result, Path(args.plot))
    return 0 if result["ok"] else 1


def _threads(args: argparse.Namespace) -> tuple[int, ...]:
    import torch

    maximum = torch.get_num_threads()
    return parse_counts(
        "--threads", args.threads or (f"1,{maximum}" if maximum > 1 else "1"), _MAX_THREADS
    )


def ops_settings(args: argparse.Namespace) -> OpsSettings:
    """The settings that the arguments of `bench ops` ask for; ValueError names a wrong one."""
    from bitnet_ops.bench.ops import OpsSettings

    parse_shapes(args.shapes)  # complain before anything is measured
    cold_mib = _COLD_MIB[args.quick] if args.cold_mib is None else int(args.cold_mib)
    seconds = _SECONDS[args.quick] if args.seconds is None else float(args.seconds)
    if not 16 <= cold_mib <= 1 << 16:
        raise ValueError(f"--cold-mib: expected 16 to {1 << 16}, got {cold_mib}")
    if not 0 < seconds <= 60:
        raise ValueError(f"--seconds: expected more than 0 and at most 60, got {seconds}")
    formats = USUAL if args.weight_format == "auto" else args.weight_format
    return OpsSettings(
        shapes=args.shapes,
        tokens=parse_counts("--m", args.m or _M[args.quick], _MAX_TOKENS),
        threads=_threads(args),
        formats=parse_words("--weight-format", formats, WEIGHT_FORMATS),
        quick=args.quick,
        cold_mib=cold_mib,
        seconds=seconds,
    )


def _pairs(text: str, auto: str = USUAL) -> tuple[tuple[str, str], ...]:
    pairs = []
    for word in text.split(","):
        weight_format, plus, head = word.partition("+")
        if not plus:
            raise ValueError(f"--formats: expected pairs such as 2bit+int8, got '{word}'")
        weight_format = auto if weight_format == "auto" else weight_format
        parse_words("--formats", weight_format, [*WEIGHT_FORMATS, auto])
        parse_words("--formats", head, HEAD_FORMATS)
        pairs.append((weight_format, head))
    return tuple(dict.fromkeys(pairs))


def model_settings(args: argparse.Namespace) -> ModelSettings:
    """The settings that the arguments of `bench model` ask for; ValueError names a wrong one."""
    from bitnet_ops.bench.images import MAX_SIDE
    from bitnet_ops.bench.run_model import ModelSettings

    if args.model is not None and args.dummy is not None:
        raise ValueError(f"expected MODEL or --dummy, got {args.model} and {args.dummy}")
    parse_words("--dummy", args.dummy or _DUMMY, list(CONFIGS))
    quick = args.quick
    kv_dtypes = ",".join(KV_DTYPES) if args.kv_dtype == "all" else args.kv_dtype
    contexts = args.contexts or _CONTEXTS[quick]
    settings = ModelSettings(
        dummy=args.dummy or _DUMMY,
        formats=_pairs(args.formats, "auto"),
        kv_dtypes=parse_words("--kv-dtype", kv_dtypes, KV_DTYPES),
        prompts=parse_counts("--prompts", args.prompts or _PROMPTS[quick], 8192),
        contexts=parse_counts("--contexts", contexts, 16384 - 64, minimum=0),
        batches=parse_counts("--batches", args.batches or _BATCHES[quick], 64),
        threads=_threads(args),
        cold_mib=128 if quick else 512,
        quick=quick,
        attention=args.attention,
        images=() if args.image is None else parse_counts("--image", args.image, MAX_SIDE),
    )
    if settings.images and args.model is None:
        raise ValueError("--image: expected a MODEL that reads pictures, got a synthetic one")
    return settings if args.model is None else _of_model(args, settings)


def _of_model(args: argparse.Namespace, settings: ModelSettings) -> ModelSettings:
    """`settings` for the model args.model: within its context where nothing was asked for."""
    from bitnet_ops.bench import images
    from bitnet_ops.bench.model import LIMITS
    from bitnet_ops.bench.run_model import DECODED
    from bitnet_ops.language_model import load

    # nothing is copied
    lm = load(args.model, weight_format="canonical", head_format="stored", image_limits=LIMITS)
    if lm.config.embedding_only:
        raise ValueError(f"MODEL: expected one that generates, got an embedding model {lm.path}")
    maximum = lm.config.max_position_embeddings
    if settings.images and lm.images is None:
        raise ValueError(f"--image: expected a model that reads pictures, got {lm.path}")
    for side in settings.images:
        assert lm.images is not None
        if (tokens := images.tokens_of(lm.images, side)) >= maximum:
            raise ValueError(
                f"--image: expected a prompt below the context of {maximum} tokens, got {tokens}"
            )
    for option, asked, counts, room in (
        ("--prompts", args.prompts, settings.prompts, 0),
        ("--contexts", args.contexts, settings.contexts, DECODED),
    ):
        if asked and max(counts) + room > maximum:
            raise ValueError(
                f"{option}: expected at most {maximum - room}, for the model has {maximum} "
                f"positions, got {max(counts)}"
            )
    return dataclasses.replace(
        settings,
        model=str(lm.path),
        prompts=tuple(n for n in settings.prompts if n <= maximum) or (maximum // 2,),
        contexts=tuple(n for n in settings.contexts if n + DECODED <= maximum),
    )


def attention_settings(args: argparse.Namespace) -> AttentionSettings:
    """The settings of the arguments of `bench attention`; ValueError names a wrong one."""
    from bitnet_ops.bench.attention import SHAPES, USUAL, AttentionSettings, policy_words

    policies = tuple(args.policies or USUAL)
    for policy in policies:
        policy_words(policy)  # complain before anything is measured
    contexts = parse_counts("--contexts", args.contexts or _ATTENDED[args.quick], 1 << 18)
    tokens = parse_counts("--tokens", args.tokens, 1 << 12)
    if max(tokens) > min(contexts):
        raise ValueError(
            f"--tokens: expected at most a context, {min(contexts)}, got {max(tokens)}"
        )
    return AttentionSettings(
        shapes=parse_words("--shapes", args.shapes or ",".join(SHAPES), list(SHAPES)),
        contexts=contexts,
        policies=policies,
        tokens=tokens,
        kv_dtypes=parse_words("--kv-dtype", args.kv_dtype, KV_DTYPES),
        threads=_threads(args),
        seconds=0.2 if args.quick else 1.0,
        check=args.check,
    )


def sparsity_settings(args: argparse.Namespace) -> SparsitySettings:
    """The settings of the arguments of `bench sparsity`; ValueError names a wrong one."""
    from bitnet_ops.bench.sparsity import SHARES, SparsitySettings

    parse_words("--dummy", args.dummy, list(CONFIGS))
    shares: tuple[float, ...] = SHARES if not args.quick else (0.0, 0.9)
    if args.zeros is not None:
        try:
            shares = tuple(float(word) for word in args.zeros.split(","))
        except ValueError:
            shares = (-1.0,)
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError(f"--zeros: expected shares from 0 to 1, got {args.zeros}")
    return SparsitySettings(
        dummy=args.dummy,
        shares=shares,
        threads=_threads(args),
        seconds=0.5 if args.quick else 4.0,
        check=args.check,
    )


def engine_settings(args: argparse.Namespace) -> EngineSettings:
    """The settings that the arguments of `bench engine` ask for; ValueError names a wrong one."""
    from bitnet_ops.bench.engine import EngineSettings

    parse_words("--dummy", args.dummy, list(CONFIGS))
    quick, pairs = args.quick, _pairs(args.formats)
    if len(pairs) != 1:
        raise ValueError(f"--formats: expected one pair such as 2bit+int8, got {args.formats}")
    contexts = args.contexts or _STREAM_CONTEXTS[quick]
    return EngineSettings(
        dummy=args.dummy,
        formats=pairs[0],
        kv_dtype=args.kv_dtype,
        streams=parse_counts("--streams", args.streams or _STREAMS[quick], 64),
        contexts=parse_counts("--contexts", contexts, 16000),
        threads=_threads(args),
        cold_mib=128 if quick else 512,
        quick=quick,
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0, or 1 when a result was wrong."""
    if args.kind == "serve":
        return _run_serve(args)
    from bitnet_ops.bench import attention, engine, ops, report, run_model, sparsity
    from bitnet_ops.bench.pinning import pinned

    settings: Any
    measure: Callable[..., dict[str, Any]]
    try:
        if args.kind == "ops":
            settings, measure = ops_settings(args), ops.run
        elif args.kind == "attention":
            settings, measure = attention_settings(args), attention.run
        elif args.kind == "sparsity":
            settings, measure = sparsity_settings(args), sparsity.run
        elif args.kind == "engine":
            settings, measure = engine_settings(args), engine.run
        else:
            settings, measure = model_settings(args), run_model.run
        require_output(args.output, replace=args.force)
    except ValueError as error:
        if type(error) is not ValueError:  # a model that cannot be read
            raise
        raise UsageError(f"bench {args.kind}: {error}") from error
    if args.kind == "model" and args.model is None and not args.json:
        about = counted(run_model.about_minutes(settings), "minute")
        print_lines([f"synthetic {settings.dummy}, about {about}; name a MODEL to measure yours"])
    with progress_line() as progress, pinned():
        if args.kind == "model" and not args.json:
            result = run_model.run(settings, progress, tell=progress.print_lines)
            lines = report.closing_lines(result)
        else:
            result = measure(settings, progress)
            lines = report.lines(result)
    print_result(result, lines, as_json=args.json)
    if args.output:
        report.write_json(result, args.output, replace=args.force)
    if args.kind == "attention" and args.plot:
        attention.plot(result, Path(args.plot))
    if args.kind == "sparsity" and args.plot:
        sparsity.plot(result, Path(args.plot))
    return 0 if result["ok"] else 1


def require_output(output: str | None, *, replace: bool) -> None:
    """Reject a report that could not be written, before minutes are spent on it."""
    from bitnet_ops.bench import report
    from bitnet_ops.formats import destination

    if output:
        file = Path(output)
        if not file.absolute().parent.is_dir() or not os.access(file.absolute().parent, os.W_OK):
            raise ValueError(f"--output: expected a file in a directory to write to, got {file}")
        destination.check(file, report.REPORT_FILE, replace=replace)
