"""Files mapped in huge pages: the right bytes, the file left alone, and None where there are none.

Whether a system maps huge pages is its own affair: both answers are right, a wrong byte is not.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from bitnet_ops.memory import mapped
from bitnet_ops.memory.mapped import HUGE_PAGE, huge_bytes, map_huge


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """17.5 huge pages, written in whole ones."""
    path = tmp_path_factory.mktemp("mapped") / "file"
    rng = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (HUGE_PAGE * 35 // 2,), dtype=torch.uint8, generator=rng)
    with open(path, "wb") as out:
        for at in range(0, data.numel(), 2 * HUGE_PAGE):
            out.write(data[at : at + 2 * HUGE_PAGE].numpy().data)
    return path


def mapping(path: Path) -> torch.Tensor | None:
    with open(path, "rb") as source:
        return map_huge(source.fileno())


def test_a_mapped_file_has_its_bytes_and_is_not_written_to(file: Path) -> None:
    memory = mapping(file)
    if memory is None:
        pytest.skip("this system maps no huge pages of files; load_cache.py reads them then")
    assert huge_bytes(memory.data_ptr()) >= 15 * HUGE_PAGE
    before = file.read_bytes()
    assert memory.numpy().tobytes() == before
    memory[: HUGE_PAGE // 2] += 1
    assert file.read_bytes() == before


def test_it_outlives_the_name_and_the_descriptor(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(file.read_bytes())
    memory = mapping(other)
    other.unlink()
    assert memory is None or memory.numpy().tobytes() == file.read_bytes()


def test_small_files_are_for_reading(tmp_path: Path) -> None:
    for size in (0, 1, 16 * HUGE_PAGE - 1):
        (tmp_path / "small").write_bytes(b"")
        os.truncate(tmp_path / "small", size)
        assert mapping(tmp_path / "small") is None


def test_pages_of_the_usual_size_are_not_taken_for_huge_ones(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(file, "rb") as source:
        pages = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    assert int(memory[::4096].sum()) > 0 and huge_bytes(memory.data_ptr()) == 0
    assert not mapped._in_huge_pages(memory)
    monkeypatch.setattr(mapped, "huge_bytes", lambda address: 0)
    assert mapping(file) is None


@pytest.mark.skipif(
    not os.path.isdir("/sys/kernel/mm/transparent_hugepage"), reason="a kernel without huge pages"
)
@pytest.mark.parametrize(("of", "taken"), [(13, False), (14, False), (15, True), (16, True)])
def test_one_sample_may_be_small(
    of: int, taken: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "huge_bytes", lambda address: of * HUGE_PAGE)
    assert (mapping(file) is not None) == taken


def test_a_system_that_says_no(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rejected(address: int) -> int:
        raise PermissionError("/proc")

    monkeypatch.setattr(mapped, "huge_bytes", rejected)
    assert mapping(file) is None
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert mapping(file) is None


def test_addresses_of_no_file_have_none() -> None:
    assert huge_bytes(0) == 0
    assert huge_bytes(torch.zeros(1 << 20).data_ptr()) == 0
