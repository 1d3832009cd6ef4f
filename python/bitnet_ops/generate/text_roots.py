"""TextRoots: the keys before the first block of a text, other ones when the weights are others.

The prefix cache finds blocks by keys that begin at a root, so that what one state of the weights,
or one adapter, has computed is never found by another.
"""

from __future__ import annotations

from typing import Any

from bitnet_ops.generate.causal_model import CausalModel
from bitnet_ops.generate.disk_prefix import root_on_disk
from bitnet_ops.nn.blocks import root_key
from bitnet_ops.nn.kv_pool import KVPool


class TextRoots:
    """The roots of one engine's texts.

    `epoch`: how often the weights have changed while texts were kept.
    """

    def __init__(self, on_disk: bool) -> None:
        self.epoch = 0
        self._on_disk = on_disk
        self._version: Any = None  # of the weights, when they were last looked at
        self._roots: dict[str | None, bytes] = {}  # of this epoch, by the adapter

    def weights_changed(self, model: CausalModel) -> bool:
        """Whether they are others than at the last call; then the epoch is another."""
        version = getattr(model, "weights_version", None)
        if version is None or (found := version()) == self._version:
            return False
        first, self._version = self._version is None, found
        self._roots.clear()
        self.epoch += not first
        return not first

    def of(self, adapter: str | None, model: CausalModel, pool: KVPool) -> bytes:
        """The key before the first block of texts with this adapter, by the weights of now."""
        if adapter not in self._roots:
            root = self.in_memory(adapter)
            if self._on_disk:
                identity: bytes = model.identity(adapter)  # type: ignore[attr-defined]
                root = root_on_disk(identity, pool)
            self._roots[adapter] = root
        return self._roots[adapter]

    def in_memory(self, adapter: str | None) -> bytes:
        """A key that no disk has: of texts that two states of the weights have computed."""
        return root_key(adapter, self.epoch)
