"""The list of words of a draft head: what lies outside it, and what its rows cost.

    python -m benchmarks.draft_words outside TEXTS NAME=RANKS...   shares of tokens outside
    python -m benchmarks.draft_words price [--threads 1 2]         time of the small head
    python -m benchmarks.draft_words learning                      time of `DraftWords.learn`

TEXTS has a folder a language with text files (`benchmarks.package_texts` makes them). RANKS is a
tokenizer's file of ranks in tiktoken's form, a word in base64 and its id a line; NAME is one of
PATTERNS, which says how it divides text. `outside` needs the package tiktoken.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitnet_ops import _runtime, machine, ops
from bitnet_ops.bench import pinning
from bitnet_ops.bench.harness import Budget, Timed, interleave, paired_ratios, summarize
from bitnet_ops.bench.limits import measure_limits, read_slots
from bitnet_ops.bench.memory import Workspace
from bitnet_ops.models.draft_words import DEFAULT_WORDS, DraftWords
from bitnet_ops.nn.head import HeadWeight
from bitnet_ops.nn.packing import pack_ternary, packed_shape
from bitnet_ops.nn.storage import FORMATS

SIZES = tuple(1024 * n for n in (8, 16, 32, 64))

# Which tokens -------------------------------------------------------------------------------------

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_ENDS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "qwen3.5": _CASES
    + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    + _ENDS,
    "qwen": _CASES + _LETTERS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS,
    "cl100k": _CASES + _LETTERS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDS,
}
# Of a conversation: tokens of the prompt and of the answer, which goes on where the prompt ends.
LONG_PROMPT, SHORT_PROMPT, ANSWER = 500, 50, 500
CONVERSATIONS = 150  # of a language, at most; the first third warms a list that has lived long
WARMING, STARTS = (1, 2, 3, 5, 10, 20, 40), 20  # conversations, and lists that begin anew
# What a call of `learn` exchanges of the dearest head, 2 bits a weight and 4,096 columns.
ROWS_OF_CALL = 7

Conversations = dict[str, list[list[int]]]


def encoding(name: str, ranks: Path) -> Any:
    """The tokenizer, an object of tiktoken."""
    lines = (line.split() for line in ranks.read_bytes().splitlines() if line)
    words = {base64.b64decode(word): int(rank) for word, rank in lines}
    tiktoken = importlib.import_module("tiktoken")
    return tiktoken.Encoding(name, pat_str=PATTERNS[name], mergeable_ranks=words, special_tokens={})


def conversations(texts: Path, tokenizer: Any) -> Conversations:
    """Pieces of every language's texts, in an order drawn once."""
    found: Conversations = {}
    length = LONG_PROMPT + ANSWER
    for folder in sorted(p for p in texts.iterdir() if p.is_dir()):
        pieces = []
        for path in sorted(folder.iterdir()):
            ids = tokenizer.encode_ordinary(path.read_text(encoding="utf-8"))
            pieces += [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
        random.Random(1).shuffle(pieces)
        found[folder.name] = pieces
    return found


def list_of(vocabulary: int, size: int) -> DraftWords:
    """A list as an engine has it, over a head of next to nothing."""
    words = DraftWords(HeadWeight(torch.zeros(vocabulary, 1), None, vocabulary, 1), size)
    words.rows_of_call = ROWS_OF_CALL
    return words


def refused(words: DraftWords, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """How many tokens of the answer are outside the list at their time."""
    words.learn(prompt)
    outside = 0
    for token in answer:
        outside += token not in words
        words.learn((token,))
    return outside


def fixed_share(pieces: Sequence[Sequence[int]], size: int) -> float:
    tokens = [i for piece in pieces for i in piece[LONG_PROMPT:]]
    return sum(i >= size for i in tokens) / len(tokens)


def counted_words(texts: Conversations, size: int) -> set[int]:
    """The commonest words of every other conversation, each language with the same weight."""
    total: Counter[int] = Counter()
    for pieces in texts.values():
        counts = Counter(i for piece in pieces[1::2] for i in piece)
        weight = 1 / sum(counts.values())
        for i, count in counts.items():
            total[i] += count * weight  # type: ignore[assignment]
    words = [i for i, _ in total.most_common(size)]
    lowest = (i for i in range(size) if i not in total)
    return {*words, *[i for i, _ in zip(lowest, range(size - len(words)), strict=False)]}


def print_outside(name: str, tokenizer: Any, texts: Conversations) -> None:
    print(f"\n{name}: {tokenizer.n_vocab:,} words; % of tokens outside")
    print("| list | language | lowest ids | counted | cold, 50 | cold, 500 | lived long | mixed |")
    print("|---|---|---|---|---|---|---|---|")
    vocabulary = tokenizer.n_vocab
    for size in SIZES:
        counted, mixed = counted_words(texts, size), mixed_shares(vocabulary, size, texts)
        for language, pieces in texts.items():
            some = pieces[:CONVERSATIONS]
            answers = [i for piece in pieces[::2] for i in piece[LONG_PROMPT:]]
            shares = [
                fixed_share(pieces, size),
                sum(i not in counted for i in answers) / len(answers),
                cold_share(vocabulary, size, some, SHORT_PROMPT),
                cold_share(vocabulary, size, some, LONG_PROMPT),
                lived_share(vocabulary, size, some),
                mixed[language],
            ]
            cells = " | ".join(f"{100 * share:.1f}" for share in shares)
            print(f"| {size // 1024}k | {language} | {cells} |", flush=True)


def cold_share(vocabulary: int, size: int, pieces: Sequence[Sequence[int]], prompt: int) -> float:
    """Every conversation is the first one."""
    outside = 0
    for piece in pieces:
        words = list_of(vocabulary, size)
        outside += refused(words, piece[LONG_PROMPT - prompt : LONG_PROMPT], piece[LONG_PROMPT:])
    return outside / (len(pieces) * ANSWER)


def lived_share(vocabulary: int, size: int, pieces: Sequence[Sequence[int]]) -> float:
    """One list for conversations in one language, the first third of which does not count."""
    words, before = list_of(vocabulary, size), len(pieces) // 3
    shares = [refused(words, piece[:LONG_PROMPT], piece[LONG_PROMPT:]) for piece in pieces]
    return sum(shares[before:]) / ((len(pieces) - before) * ANSWER)


def mixed_shares(vocabulary: int, size: int, texts: Conversations) -> dict[str, float]:
    """One list for conversations in all languages by turns, the first third likewise."""
    turns = min(CONVERSATIONS, *map(len, texts.values()))
    words, outside = list_of(vocabulary, size), Counter[str]()
    for turn in range(turns):
        for language, pieces in texts.items():
            piece = pieces[turn]
            here = refused(words, piece[:LONG_PROMPT], piece[LONG_PROMPT:])
            outside[language] += here if turn >= turns // 3 else 0
    counted = (turns - turns // 3) * ANSWER
    return {language: outside[language] / counted for language in texts}


def print_warming(name: str, vocabulary: int, texts: Conversations) -> None:
    """How fast a list of the usual size gets to know a language."""
    print(f"\n{name}, {DEFAULT_WORDS:,} words; % of tokens outside in a list's n-th conversation")
    print("| language | " + " | ".join(map(str, WARMING)) + " |")
    print("|---|" + "---|" * len(WARMING))
    for language, pieces in texts.items():
        total = [0] * len(WARMING)
        drawn = random.Random(2)
        for _ in range(STARTS):
            words = list_of(vocabulary, DEFAULT_WORDS)
            for number, piece in enumerate(drawn.sample(pieces, WARMING[-1]), 1):
                here = refused(words, piece[:LONG_PROMPT], piece[LONG_PROMPT:])
                if number in WARMING:
                    total[WARMING.index(number)] += here
        shares = (f"{100 * here / (STARTS * ANSWER):.1f}" for here in total)
        print(f"| {language} | " + " | ".join(shares) + " |", flush=True)


def outside(args: argparse.Namespace) -> None:
    for given in args.ranks:
        name, _, path = given.partition("=")
        tokenizer = encoding(name, Path(path))
        texts = conversations(args.texts, tokenizer)
        print(", ".join(f"{k}: {len(v)} conversations" for k, v in texts.items()))
        print_warming(name, tokenizer.n_vocab, texts)
        print_outside(name, tokenizer, texts)


# What rows cost -----------------------------------------------------------------------------------


class Part(NamedTuple):
    """A head of some rows: its bytes, how to run it and to read as many bytes, both cold."""

    form: str
    columns: int
    rows: int
    nbytes: int
    run: Timed
    read: Timed


def _aligned(count: int) -> int:
    return -(-count // 64) * 64


def part(ws: Workspace, form: str, columns: int, rows: int, read_form: Any) -> Part:
    shape: tuple[int, ...]
    scale_shape: tuple[int, ...]
    if form == "int8":
        shape, scale_shape, dtype = (rows, columns), (rows,), torch.float32
    else:
        shape = packed_shape(rows, columns, form)
        block = shape[2] if len(shape) == 3 else 5 * shape[2]
        scale_shape, dtype = (shape[0], columns // 128, block), torch.float16
    scale = torch.full(scale_shape, 0.01, dtype=dtype)
    weight_bytes = int(torch.Size(shape).numel())
    nbytes = weight_bytes + scale.nbytes
    slots = ws.ternary.slots(_aligned(weight_bytes) + scale.nbytes)
    operands: list[tuple[Tensor, Tensor]] = []
    for slot in slots:
        scales = slot[_aligned(weight_bytes) :].view(dtype).view(scale_shape)
        scales.copy_(scale)
        weight = slot[:weight_bytes].view(shape)
        operands.append((weight.view(torch.int8) if form == "int8" else weight, scales))
    x = torch.randn(1, columns, generator=ws.generator).bfloat16()

    def head(i: int) -> Tensor:
        return ops.lm_head(x, *operands[i % len(operands)], (rows, columns))

    pages = [slot[: nbytes // 4096 * 4096] for slot in slots]
    read = read_slots(pages, read_form, len(pages) // 2, cold=True)
    return Part(form, columns, rows, nbytes, Timed(head, cold=True), read)


def price(args: argparse.Namespace) -> None:
    print(f"{machine.cpu_model()}, kernels {_runtime.isa()}, torch {torch.__version__}")
    ws = Workspace(args.cold_mib << 20, 0)
    print("| head | columns | rows | threads | MB | ms (best) | of reading (bests) | waited |")
    print("|---|---|---|---|---|---|---|---|")
    with pinning.pinned():
        for threads in args.threads:
            limits = measure_limits(ws.ternary, threads, Budget(2.0))
            for form in ("int8", "2bit", "1.6bit"):
                for columns in (2048, 4096):
                    parts = [part(ws, form, columns, rows, limits.form) for rows in SIZES]
                    _print_prices(parts, threads, args.seconds)
            shown = "unstable" if limits.unstable else f"{limits.read_gb_s:.1f} GB/s"
            print(f"reading with {threads} threads: {shown} ({limits.form})")


def _print_prices(parts: Sequence[Part], threads: int, seconds: float) -> None:
    runs = [run for p in parts for run in (p.run, p.read)]
    rounds = interleave(runs, Budget(seconds, min_rounds=10))
    usable = rounds.usable()
    for p, took, read in zip(parts, usable[::2], usable[1::2], strict=True):
        share = p.nbytes / (p.nbytes // 4096 * 4096)
        ratio = share / summarize(paired_ratios(took, read)).median
        best = share * min(read) / min(took)
        state = "disturbed" if rounds.disturbed else f"{max(rounds.waited):.0%}"
        ms = f"{summarize(took).median * 1e3:.2f} ({min(took) * 1e3:.2f})"
        cells = p.form, p.columns, p.rows, threads, f"{p.nbytes / 1e6:.1f}", ms
        print(
            "|", " | ".join(map(str, (*cells, f"{ratio:.2f} ({best:.2f})", state))), "|", flush=True
        )


# What learning costs ------------------------------------------------------------------------------


def heads(columns: int, vocabulary: int) -> Iterator[tuple[str, HeadWeight]]:
    g = torch.Generator().manual_seed(1)
    for form in ("bf16", "int8", "int4"):
        dense = torch.randn(vocabulary, columns, generator=g).bfloat16()
        yield form, HeadWeight.from_dense(dense, form)
    codes = torch.randint(-1, 2, (vocabulary, columns), dtype=torch.int8, generator=g)
    packed = pack_ternary(codes, torch.ones(vocabulary, columns // 128), 128)
    for layout in FORMATS:
        yield layout, HeadWeight.from_packed(packed.repack(layout))


def _best(call: Callable[[int], object], times: int) -> tuple[float, float]:
    """The median and the best seconds of a call."""
    took = []
    for i in range(times):
        began = time.perf_counter()
        call(i)
        took.append(time.perf_counter() - began)
    return summarize(took).median, min(took)


def learning(args: argparse.Namespace) -> None:
    vocabulary, size = 131072, DEFAULT_WORDS
    print("| head | columns | made, ms | rows a call | us a full call | us a new word | us, none |")
    print("|---|---|---|---|---|---|---|")
    drawn = random.Random(1)
    for columns in (2048, 4096):
        for name, trunk in heads(columns, vocabulary):
            made, _ = _best(lambda _, t=trunk: DraftWords(t, size), 3)  # type: ignore[misc]
            words = DraftWords(trunk, size)
            rows = words.rows_of_call
            new = iter(drawn.sample(range(size, vocabulary), 100 * (rows + 1)))
            batches = [[next(new) for _ in range(rows)] for _ in range(100)]
            full = _best(lambda i, w=words, b=batches: w.learn(b[i]), 100)  # type: ignore[misc]
            single = [[next(new)] for _ in range(100)]
            one = _best(lambda i, w=words, b=single: w.learn(b[i]), 100)  # type: ignore[misc]
            none = _best(lambda i, w=words: w.learn((3,)), 100)  # type: ignore[misc]
            cells = " | ".join(f"{1e6 * m:.1f} ({1e6 * b:.1f})" for m, b in (full, one, none))
            print(f"| {name} | {columns} | {1e3 * made:.0f} | {rows} | {cells} |", flush=True)
    known: list[int] = words.ids[-600:-100].tolist()
    median, best = _best(lambda _: words.learn(known), 100)
    print(f"500 tokens of the list: {1e6 * median:.0f} us, at best {1e6 * best:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("outside")
    one.add_argument("texts", type=Path)
    one.add_argument("ranks", nargs="+")
    one.set_defaults(run=outside)
    one = commands.add_parser("price")
    one.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    one.add_argument("--seconds", type=float, default=8.0)
    one.add_argument("--cold-mib", type=int, default=1536)
    one.set_defaults(run=price)
    one = commands.add_parser("learning")
    one.set_defaults(run=learning)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
