"""Stub of torchvision.io; see the package's docstring."""

from enum import Enum

from torchvision import raising


class ImageReadMode(Enum):
    """A class, because SGLang reads members of it when it is imported."""

    UNCHANGED = 0
    GRAY = 1
    RGB = 3


__getattr__ = raising(__name__)
