"""Stub of torchvision.transforms.functional; see the package's docstring."""

from torchvision import raising
from torchvision.transforms import InterpolationMode as InterpolationMode

__getattr__ = raising(__name__)
