"""Stub of torchvision.transforms.v2; see the package's docstring."""

from torchvision import raising
from torchvision.transforms import InterpolationMode as InterpolationMode

__getattr__ = raising(__name__)
