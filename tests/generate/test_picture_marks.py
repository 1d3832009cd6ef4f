"""Pictures of a conversation as marks, and prompts whose padding tokens are as many as pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bitnet_ops
import vision_models
from bitnet_ops.generate.images import Images
from bitnet_ops.generate.pictures import Picture, PictureMarks
from bitnet_ops.generate.prompt import PromptRows
from bitnet_ops.generate.request import ClosedError
from bitnet_ops.vision.errors import ImageError
from pictures import file_of, photograph

FILE = file_of(photograph(64, 64, 3))


def test_marks_of_any_number_are_told_apart() -> None:
    marks = PictureMarks()
    texts = [marks.put(Picture(where=str(i))) for i in range(100_003)]
    assert [one.where for one in marks.found(texts[-1] + texts[10_000])] == ["100002", "10000"]
    assert marks.without(f"a{texts[-1]}0b", "+") == "a+0b"
    assert marks.joined(["a", "b", texts[0], texts[1], "c"]) == f"a\nb{texts[0]}{texts[1]}c"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def images(folder: Path) -> Images:
    found = bitnet_ops.load(folder).images
    assert found is not None
    return found


def test_every_picture_has_a_padding_token(images: Images) -> None:
    pad, picture = images.config.image_token_id, Picture(FILE)
    rows, columns = images.grid(picture)
    assert images.padded([1, pad, 2], [picture]) == [1, *[pad] * (rows * columns), 2]
    for ids, pictures in (([1, 2], [picture]), ([pad, pad], [picture]), ([pad], [])):
        with pytest.raises(ImageError, match="a padding token for each of"):
            images.padded(ids, pictures)
        with pytest.raises(ImageError, match="a padding token for each of"):
            images.expand(ids, pictures)
        with pytest.raises(ImageError, match="a padding token for each of"):
            images.joined(ids, [PromptRows(torch.zeros(1, 4), pad) for _ in pictures])
    assert images.computed == 0


def test_a_closed_model_has_given_its_tower_up(folder: Path) -> None:
    lm = bitnet_ops.load(folder)
    lm.image(FILE)
    lm.close()
    assert lm.images is None
    with pytest.raises(ClosedError):
        lm.image(FILE)
