"""Grammars: JSON, JSON schemas and grammars of our own as constraints, by llguidance.

A schema comes from a stranger: its size and depth are limited here, and what it takes to compile
it and to follow it by llguidance's limits. The worst of those that were tried took half a second
and 110 MB (a list of a hundred thousand values, which is rejected).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bitnet_ops.errors import BitNetError, install
from bitnet_ops.generate.constraint import Mask, TokenTexts, only
from bitnet_ops.generate.sampling import SamplingError
from bitnet_ops.generate.schema_rules import JSON_OPTIONS, closed
from bitnet_ops.generate.tokenizer import Tokenizer
from bitnet_ops.untrusted import is_deeper, printable

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CHARACTERS = 256 << 10  # of a schema or a grammar
_DEEPEST = 64
_STATES = 50_000  # of a lexer, of 2 kB each
_PROBED = 4  # tokens of a new grammar that are tried
_MAX_REMEMBERED = 4096  # answers of `holds`


class GrammarError(BitNetError, ValueError):
    """A schema or grammar that cannot be followed; the message begins with its field."""


class ConstraintError(SamplingError):
    """A constraint that cannot go on; the request that has it fails."""


class Grammars:
    """Compiles grammars for one model; made once, for it takes a second. For any threads.

    Args:
        tokenizer: of the model.
        vocab_size: how many logits the model has.
        stop_ids: one of these ends an answer, and only where its grammar allows an end.
    Attributes: `texts`, of the tokens.
    Raises GrammarError without llguidance, stop ids, or for a tokenizer that it does not know.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Collection[int]) -> None:
        try:
            import llguidance
        except ImportError:
            raise GrammarError(
                f"grammar: expected the package llguidance, got none; run: {install('server')}"
            ) from None
        if not stop_ids:
            raise GrammarError("grammar: expected a model with ids that end a text, got none")
        self._library, self._tokenizer, backend = llguidance, tokenizer, tokenizer.backend
        self.stop_ids = sorted(stop_ids)
        size = max(vocab_size, backend.get_vocab_size())
        try:
            known = llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=self.stop_ids)
        except Exception as error:  # ValueError, or a panic's
            raise GrammarError(
                f"grammar: expected a tokenizer of bytes, got: {str(error)[:200]}; constraints "
                "are not available for this model"
            ) from None
        added = backend.get_added_tokens_decoder()
        ids = set(backend.get_vocab(with_added_tokens=True).values())
        tokens = [
            added[i].content.encode()
            if i in added
            else known.decode_bytes([i])
            if i in ids
            else b""
            for i in range(size)
        ]
        self._special = {t.content: i for i, t in added.items() if t.special}
        special = [*self._special.values(), *self.stop_ids]
        wrapped = _Wrapped(tokenizer, tokens, special, self.stop_ids[0])
        self._vocabulary = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(wrapped), eos_token=self.stop_ids
        )
        self._limits = llguidance.LLParserLimits(max_lexer_states=_STATES, verbose_errors=False)
        self.texts = TokenTexts(tokenizer, size, tokens, self.stop_ids)
        self.stop_mask = only(size, self.stop_ids)
        self._held: dict[str, bool] = {}

    def json(self, field: str = "format") -> Grammar:
        """Any JSON object."""
        return self.schema({"type": "object"}, field)

    def schema(self, schema: Any, field: str = "schema") -> Grammar:
        """JSON of a JSON schema, properties in its order, and no others than it names.

        Blanks stand behind commas and colons alone, one or none. Raises GrammarError, whose message
        begins with `field`, for a schema that cannot be held in full.
        """
        text = schema_text(schema, field)
        return self._compile(self._library.LLMatcher.grammar_from_json_schema(text), field)

    def lark(self, text: str, field: str = "grammar", *, soft: bool = False) -> Grammar:
        """What a grammar in llguidance's form of Lark allows; raises GrammarError.

        soft: where it becomes too costly to follow, the answer goes on without it.
        """
        if len(text) > 16 * MAX_CHARACTERS:
            raise GrammarError(f"{field}: expected schemas of at most 4 MiB in all, got more")
        return self._compile(self._library.LLMatcher.grammar_from_lark(text), field, soft)

    def holds(self, text: str) -> bool:
        """Whether a grammar in Lark can be compiled."""
        if text not in self._held:
            if len(self._held) >= _MAX_REMEMBERED:
                self._held.clear()
            grammar = self._library.LLMatcher.grammar_from_lark(text)
            self._held[text] = not self._matcher(grammar).is_error()
        return self._held[text]

    def literal(self, text: str) -> str:
        """`text` as a part of a rule in Lark; the special tokens in it are tokens."""
        for name, i in self._special.items():
            before, found, after = text.partition(name)
            if found:
                parts = (self.literal(before), f"<[{i}]>", self.literal(after))
                return " ".join(part for part in parts if part)
        return json.dumps(text, ensure_ascii=False) if text else ""

    def tokens_of(self, data: bytes) -> list[int]:
        """Tokens whose bytes `data` is, as llguidance wants them."""
        return self._vocabulary.tokenize_bytes(data)

    def _matcher(self, grammar: str) -> LLMatcher:
        return self._library.LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits)

    def _compile(self, grammar: str, field: str, soft: bool = False) -> Grammar:
        matcher = self._matcher(grammar)
        if not matcher.is_error():
            first = matcher.deep_copy()
            for _ in range(_PROBED):  # some are too large only when they are followed
                mask = np.frombuffer(first.compute_bitmask(), np.uint8)
                ids = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
                ids = np.setdiff1d(ids, self.stop_ids)
                if first.is_error() or not len(ids):
                    break
                first.consume_token(int(ids[0]))
            if not first.is_error() and (first.is_accepting() or not first.is_stopped()):
                return Grammar(self, matcher, grammar, soft)
            matcher = first
        reason = " ".join((matcher.get_error() or "one that nothing satisfies").split())[:300]
        raise GrammarError(f"{field}: expected one that can be followed, got: {printable(reason)}")


def schema_text(schema: Any, field: str) -> str:
    """A JSON schema as text for llguidance, within limits; raises GrammarError."""
    if not isinstance(schema, Mapping | bool):
        raise GrammarError(f"{field}: expected a JSON schema, got a {type(schema).__name__}")
    if is_deeper(schema, _DEEPEST):
        raise GrammarError(f"{field}: expected a schema at most {_DEEPEST} deep, got a deeper one")
    if isinstance(schema, Mapping):
        schema = {**closed(schema), "x-guidance": JSON_OPTIONS}
    try:
        text = json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise GrammarError(f"{field}: expected a JSON schema, got: {error}") from None
    if len(text) > MAX_CHARACTERS:
        raise GrammarError(
            f"{field}: expected a schema of at most {MAX_CHARACTERS >> 10} KiB, got more"
        )
    return text


class _Wrapped:
    """What llguidance asks of a tokenizer; it encodes text that a grammar leaves no choice in."""

    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, tokens: Sequence[bytes], special: Sequence[int], end: int
    ) -> None:
        self._tokenizer, self.tokens, self.special_token_ids = tokenizer, tokens, special
        self.eos_token_id = end

    def __call__(self, text: bytes | str) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode_plain(text)


class Grammar:
    """A compiled grammar; `start` and `lazy` make a constraint of it for each answer.

    For the answers of one request: they share a lexer, whose size is limited. To compile it again
    takes a millisecond.
    """

    def __init__(
        self, grammars: Grammars, matcher: LLMatcher, text: str, soft: bool = False
    ) -> None:
        self.grammars, self.soft = grammars, soft
        self._matcher, self._text = matcher, text

    def start(self) -> GrammarConstraint:
        """It holds from the first token on."""
        return GrammarConstraint(self, self._matcher.deep_copy())

    def compiled_again(self) -> LLMatcher:
        """One that shares no lexer with others."""
        return self.grammars._matcher(self._text)

    def lazy(
        self, triggers: Sequence[str], openings: Sequence[str] = (), *, repeat: bool = True
    ) -> LazyConstraint:
        """It holds behind each of the texts `triggers`; until one comes nothing is masked.

        openings: triggers at the beginning of the answer alone, behind white space; the grammar
        begins with them, not behind them. repeat: whether text is free again behind the grammar's
        end; else the answer ends there.
        """
        return LazyConstraint(self, triggers, openings, repeat=repeat)


class GrammarConstraint:
    """An answer that follows a grammar from its first token to its end.

    Looking ahead costs the lexer states, which are limited. So that nothing depends on drafts, a
    matcher that fails after it has looked ahead makes room for one that has taken the same steps
    and never looked.
    """

    def __init__(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self._grammar, self._grammars = grammar, grammar.grammars
        self._matcher, self._ended = matcher, False
        self._looks, self._looked = True, False
        self._steps: list[tuple[bool, list[int]]] = []  # whether a mask was asked for; what came
        self._masked = False

    @property
    def over(self) -> bool:
        """Whether nothing can come any more."""
        return self._ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    @property
    def failed(self) -> bool:
        return self._matcher.is_error()

    def mask(self) -> Mask:
        if self.over:
            return self._grammars.stop_mask
        self._masked = True
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error() and self._looked:
            self._start_again()
            return self.mask()
        if not self._matcher.is_error():
            return mask
        if self._grammar.soft:
            return np.full_like(mask, 0xFF)
        reason = " ".join(self._matcher.get_error().split())[:300]
        raise ConstraintError(
            f"constraint: expected an answer that its grammar allows, got: {printable(reason)}"
        )

    def allowed_prefix(self, tokens: Sequence[int]) -> int:
        if self.over:
            return int(bool(tokens) and tokens[0] in self._grammars.stop_ids)
        if self._matcher.is_error() or not self._looks:
            return len(tokens)
        self._looked = True
        return self._matcher.validate_tokens(list(tokens))

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether nothing can come behind `tokens`, all of which may; it stays as it is."""
        copy = self._matcher.deep_copy()
        copy.consume_tokens(list(tokens))
        return copy.is_stopped() and not copy.is_error()

    def add(self, token: int) -> None:
        if not self.over:
            self._consume([token])
            self._ended = token in self._grammars.stop_ids

    def feed(self, data: bytes) -> None:
        if data and not self.over:
            self._consume(self._grammars.tokens_of(data))

    def _consume(self, tokens: list[int]) -> None:
        self._steps.append((self._masked, tokens))
        self._masked = False
        self._matcher.consume_tokens(tokens)

    def _start_again(self) -> None:
        self._matcher = self._grammar.compiled_again()
        self._looks = self._looked = False
        for masked, tokens in self._steps:
            if masked:
                self._matcher.compute_bitmask()
            self._matcher.consume_tokens(tokens)


class LazyConstraint:
    """A grammar that waits for a text (see Grammar.lazy)."""

    def __init__(
        self,
        grammar: Grammar,
        triggers: Sequence[str],
        openings: Sequence[str] = (),
        *,
        repeat: bool = True,
    ) -> None:
        self._grammar, self._texts = grammar, grammar.grammars.texts
        self._triggers = [text.encode() for text in triggers]
        self._openings = [text.encode() for text in openings]
        self._keep = max(map(len, self._triggers), default=1) - 1
        self._repeat, self._ended = repeat, False
        self._seen = b""  # in which a trigger may have begun
        self._held: GrammarConstraint | None = None

    def mask(self) -> Mask | None:
        if self._held is not None:
            return self._held.mask()
        return self._grammar.grammars.stop_mask if self._ended else None

    def allowed_prefix(self, tokens: Sequence[int]) -> int:
        if self._held is not None:
            count = self._held.allowed_prefix(tokens)
            free = self._repeat and count < len(tokens) and self._held.ends_with(tokens[:count])
            return len(tokens) if free else count
        if not self._ended:
            return len(tokens)
        return int(bool(tokens) and tokens[0] in self._grammar.grammars.stop_ids)

    def add(self, token: int) -> None:
        if self._held is None:
            self.feed(self._texts[token])
        else:
            self._held.add(token)
            self._look_at_end()

    def feed(self, data: bytes) -> None:
        if self._ended:
            return
        if self._held is not None:
            self._held.feed(data)
            self._look_at_end()
            return
        self._seen += data
        while (end := self._triggered()) is not None:
            held, rest = self._grammar.start(), self._seen[end:]
            held.feed(rest)
            if not held.failed:
                self._held, self._seen = held, b""
                self._look_at_end()
                return
            self._seen = rest  # a token has gone on with what is no call: it is text
        if not self._openings:
            self._seen = self._seen[-self._keep :] if self._keep else b""

    def _triggered(self) -> int | None:
        """Where the grammar begins in what was seen."""
        if self._openings:
            text = self._seen.lstrip()
            for opening in self._openings:
                if text.startswith(opening):
                    self._openings = []
                    return len(self._seen) - len(text)
            if not any(opening.startswith(text) for opening in self._openings):
                self._openings = []
        found = [(at, at + len(t)) for t in self._triggers if (at := self._seen.find(t)) >= 0]
        return min(found)[1] if found else None

    def _look_at_end(self) -> None:
        if self._held is not None and self._held.over:
            self._held, self._ended = None, not self._repeat
