"""Which tower for images a conversion takes: the source's own, or that of an mmproj file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitnet_ops.convert.errors import reject
from bitnet_ops.convert.hybrid import TOWER, counted
from bitnet_ops.convert.source import Source
from bitnet_ops.convert.tower import check_pair, choose_mmproj, mmproj_tower
from bitnet_ops.formats.gguf import is_gguf
from bitnet_ops.loading.resolve import mmproj_beside


@contextmanager
def with_tower(
    source: Source, mmproj: str | Path | None = None, wanted: bool = True
) -> Iterator[None]:
    """Give `source` its tower for images, open meanwhile, or a remark why it has none."""
    plan, beside = source.plan, list[str]()
    config = plan.config
    file = None if mmproj is None else Path(mmproj)
    if file is not None and not config.family.hybrid:
        reject("mmproj", "a model that reads images (Qwen3.5) for --mmproj", config.model_type)
    own = source.own_tower() if wanted and file is None else None
    if own is None and wanted and file is None and config.family.hybrid and is_gguf(source.path):
        file, beside = choose_mmproj(mmproj_beside(source.path), config.hidden_size)
    source.tower_remarks = beside
    if file is not None and wanted:
        with mmproj_tower(file, source.image_ids()) as tower:
            source.tower = check_pair(tower, config.hidden_size, config.vocab_size)
            yield
        return
    if own is not None:
        source.tower = check_pair(own, config.hidden_size, config.vocab_size)
    elif plan.tower:
        source.tower_remarks = [*beside, *counted([TOWER] * len(plan.tower))]
    yield
