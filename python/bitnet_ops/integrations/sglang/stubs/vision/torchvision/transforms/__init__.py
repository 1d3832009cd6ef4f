"""Stub of torchvision.transforms; see the package's docstring."""

from enum import Enum

from torchvision import raising


class InterpolationMode(Enum):
    """A class, because transformers builds tables from its members when it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__getattr__ = raising(__name__)
