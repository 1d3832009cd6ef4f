"""The error of a picture that is not taken."""

from __future__ import annotations

from bitnet_ops.errors import BitNetError


class ImageError(BitNetError, ValueError):
    """A picture that is not taken: `<where>: expected ..., got ...; remedy`, in one line.

    It holds nothing of the picture's bytes. `at` says the same of another place, such as
    `messages[0].content[1]`.
    """

    def __init__(self, expected: str, got: str, remedy: str, where: str = "image") -> None:
        super().__init__(f"{where}: expected {expected}, got {got}; {remedy}")
        self.expected, self.got, self.remedy = expected, got, remedy

    def at(self, where: str) -> ImageError:
        """This error of the picture at `where`."""
        return type(self)(self.expected, self.got, self.remedy, where)

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, str, str, str]]:
        where = str(self).partition(": expected ")[0]
        return type(self), (self.expected, self.got, self.remedy, where)
