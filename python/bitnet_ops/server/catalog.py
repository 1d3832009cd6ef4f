"""Catalog: the models that a server has, by the names under which clients ask for them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitnet_ops.generate.grammar import Grammars
from bitnet_ops.language_model import LanguageModel
from bitnet_ops.server.exchange import AskError
from bitnet_ops.vision.sources import NOTHING, ImageSources


class ModelGrammars:
    """The Grammars of a model, made when they are first wanted; for any threads."""

    def __init__(self, lm: LanguageModel) -> None:
        self._lm, self._lock = lm, threading.Lock()

    def __call__(self) -> Grammars:
        with self._lock:
            return self._lm.grammars


@dataclass(frozen=True)
class Served:
    """A model under a name.

    adapter: which LoRA adapter runs beside it. sources: what pictures may be fetched from.
    """

    name: str
    lm: LanguageModel
    grammars: ModelGrammars
    adapter: str | None = None
    sources: ImageSources = NOTHING

    @property
    def context_length(self) -> int:
        return self.lm.config.max_position_embeddings

    @property
    def chat_template(self) -> str | None:
        return self.lm.tokenizer.chat_template

    @property
    def parameters(self) -> int:
        """How many weights the model has, unpacked, without a draft head."""
        found = 0
        head = getattr(self.lm.model, "draft_head", None)
        left_out = set() if head is None else {*head.modules()}
        module: Any
        for module in self.lm.model.modules():
            if module in left_out:
                continue
            if hasattr(module, "in_features"):
                found += module.in_features * module.out_features
            else:
                own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                found += sum(tensor.numel() for tensor in own)
        return found

    @property
    def thinks(self) -> bool:
        template = self.chat_template or ""
        return any(word in template for word in ("<think>", "enable_thinking", "reasoning_effort"))

    @property
    def capabilities(self) -> list[str]:
        """In Ollama's words."""
        if self.lm.config.embedding_only:
            return ["embedding"]
        found = ["completion"]
        if self.chat_template is not None:
            found += ["tools", *(["thinking"] if self.thinks else [])]
            found += ["vision"] if self.lm.images is not None else []
        if infill_ids(self.lm) is not None:
            found.append("insert")
        return found


class Catalog:
    """Names of models; the first one is what a request without a name gets.

    Args:
        models: by name.
        adapters: names of LoRA adapters, each a model of its own for clients, and the model beside
            which it runs.
        any_name: whether an unknown name means the first model.
        sources: what pictures may be fetched from.
    """

    def __init__(
        self,
        models: Mapping[str, LanguageModel],
        adapters: Mapping[str, str],
        *,
        any_name: bool = False,
        sources: ImageSources = NOTHING,
    ) -> None:
        self._served = {
            name: Served(name, lm, ModelGrammars(lm), sources=sources)
            for name, lm in models.items()
        }
        for adapter, model in adapters.items():
            base = self._served[model]
            self._served[adapter] = dataclasses.replace(base, name=adapter, adapter=adapter)
        self._any_name = any_name

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    @property
    def models(self) -> Sequence[LanguageModel]:
        """Each model once, whatever its adapters."""
        return [one.lm for one in self if one.adapter is None]

    def find(self, name: str) -> Served:
        """The model of that name. Raises AskError, 404, if there is none."""
        first = next(iter(self))
        found = self._served.get(name) or self._served.get(name.removesuffix(":latest"))
        if found is not None:
            return found
        if not name or self._any_name:
            return first
        raise AskError(
            f"server: expected model as one of {', '.join(self._served)}, got {name[:80]!r}; "
            "GET /v1/models lists them",
            status=404,
            field="model",
            code="model_not_found",
        )


def infill_ids(lm: LanguageModel) -> tuple[int, int, int] | None:
    """The tokens before a text to be completed, before what follows it, and before the middle."""
    forms = ("<|fim_{}|>", "<fim_{}>", "<|{}_fim|>", "<fim-{}>")
    for form in forms:
        ids = [lm.tokenizer.token_id(form.format(w)) for w in ("prefix", "suffix", "middle")]
        if None not in ids:
            return ids[0], ids[1], ids[2]  # type: ignore[return-value]
    return None
