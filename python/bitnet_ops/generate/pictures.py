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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

_DIGITS = 9  # more pictures than any request has room for


@dataclass(frozen=True)
class Picture:
    """A picture.

    data: its file. source: what says where it is found, before that is read: base64, an address.
    where: where it stood, as errors say it: messages[0].content[1]. needed: False where a remark
    may stand in its place if it cannot be read, as of an earlier turn.
    """

    data: bytes = field(default=b"", repr=False)
    source: str = field(default="", repr=False)
    where: str = "image"
    needed: bool = True


class PictureMarks:
    """The pictures of one conversation, in their order, and the marks that stand for them.

    Attributes: `pictures`; `remarks`: by its number, what is said in the place of a picture.
    """

    def __init__(self) -> None:
        self.pictures: list[Picture] = []
        self.remarks: dict[int, str] = {}
        self._word = f"picture{secrets.token_hex(16)}n"
        self._pattern = re.compile(f"{self._word}([0-9]{{{_DIGITS}}})")

    def __len__(self) -> int:
        return len(self.pictures)

    def put(self, picture: Picture) -> str:
        """The mark of one more picture."""
        self.pictures.append(picture)
        return f"{self._word}{len(self.pictures) - 1:0{_DIGITS}}"

    def read(
        self,
        data_of: Callable[[Picture], bytes],
        remark_of: Callable[[Exception], str],
        errors: type[Exception],
    ) -> None:
        """Read what pictures name; one that fails with `errors` and is not needed gets a remark.

        Those that have a remark are not read.
        """
        for i, picture in enumerate(self.pictures):
            if i in self.remarks:
                continue
            try:
                self.pictures[i] = replace(picture, data=data_of(picture), source="")
            except errors as error:
                if picture.needed:
                    raise
                self.remarks[i] = remark_of(error)

    def found(self, text: str) -> list[Picture]:
        """The pictures whose marks stand in `text`, in their order there; none with remarks."""
        numbers = map(int, self._pattern.findall(text))
        return [self.pictures[n] for n in numbers if n not in self.remarks]

    def without(self, text: str, by: str) -> str:
        """`text` with `by`, or the remark on it, in the place of every mark."""
        return self._pattern.sub(lambda found: self.remarks.get(int(found[1]), by), text)

    def joined(self, texts: Iterable[str]) -> str:
        """Texts with a line each; around pictures nothing is added, as templates have it."""
        result = ""
        for text in texts:
            if result and not self._pattern.match(text) and not self._ends_with_mark(result):
                result += "\n"
            result += text
        return result

    def _ends_with_mark(self, text: str) -> bool:
        return self._pattern.fullmatch(text[-len(self._word) - _DIGITS :]) is not None


def marked_content(content: Any, marks: PictureMarks) -> Any:
    """A message's content with marks for its pictures: parts {"type": "image", "image": Picture}.

    Any other content is given back unchanged.
    """
    if not isinstance(content, list) or not any(_picture(part) for part in content):
        return content
    found: list[str] = []
    for part in content:
        picture = _picture(part)
        text = marks.put(picture) if picture is not None else part
        if isinstance(text, dict) and text.get("type") == "text":
            text = text.get("text")
        if not isinstance(text, str):
            return content  # who reads it says what is wrong
        found.append(text)
    return marks.joined(found)


def _picture(part: Any) -> Picture | None:
    found = part.get("image") if isinstance(part, dict) and part.get("type") == "image" else None
    return found if isinstance(found, Picture) else None
