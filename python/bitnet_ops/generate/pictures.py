"""Pictures of a conversation: marks in its texts, and what stands in their place in a prompt.

A content's picture becomes a mark, a word that nobody can guess, so that messages stay texts, which
are merged, moved and cut like others, and templates need not know of pictures. In the text that the
template has made each mark becomes what models are trained with: the tokens before a picture, one
for padding and those behind it. So a padding token comes from a picture alone, never from what
somebody wrote.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import Any

_DIGITS = 5


@dataclass(frozen=True)
class Picture:
    """A picture's file. `where`: where it stood, as errors say it: messages[0].content[1]."""

    data: bytes = field(repr=False)
    where: str = "image"


class PictureMarks:
    """The pictures of one conversation, in their order, and the marks that stand for them."""

    def __init__(self) -> None:
        self.pictures: list[Picture] = []
        self._word = f"picture{secrets.token_hex(16)}n"

    def __len__(self) -> int:
        return len(self.pictures)

    def put(self, picture: Picture) -> str:
        """The mark of one more picture."""
        self.pictures.append(picture)
        return f"{self._word}{len(self.pictures) - 1:0{_DIGITS}}"

    def found(self, text: str) -> list[Picture]:
        """The pictures whose marks stand in `text`, in their order there."""
        return [self.pictures[int(n)] for n in re.findall(self._pattern, text)]

    def without(self, text: str, by: str) -> str:
        """`text` with `by` in the place of every mark."""
        return re.sub(self._pattern, lambda _: by, text)

    @property
    def _pattern(self) -> str:
        return f"{self._word}([0-9]{{{_DIGITS}}})"


def marked_content(content: Any, marks: PictureMarks) -> Any:
    """A message's content with marks for its pictures: parts {"type": "image", "image": Picture}.

    Texts beside a picture follow it as they are; any other content is given back unchanged.
    """
    if not isinstance(content, list) or not any(_picture(part) for part in content):
        return content
    found: list[Any] = []
    for part in content:
        picture = _picture(part)
        text = marks.put(picture) if picture is not None else part
        if isinstance(text, dict) and text.get("type") == "text":
            text = text.get("text")
        if not isinstance(text, str):
            return content  # who reads it says what is wrong
        found.append(text)
    return "".join(found)


def _picture(part: Any) -> Picture | None:
    found = part.get("image") if isinstance(part, dict) and part.get("type") == "image" else None
    return found if isinstance(found, Picture) else None
