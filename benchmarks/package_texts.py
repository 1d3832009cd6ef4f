"""Texts of six languages out of unpacked Debian packages, for studies of tokens.

    python -m benchmarks.package_texts ROOT OUT

ROOT holds a folder a package, as `dpkg -x` unpacks it: those of SOURCES. OUT gets a folder a
language with one UTF-8 file a source, at most 1.6 million letters. Paragraphs that have stood
before, that are English in a translation, or hardly in the language's script are left out, of
languages but not of code.
"""

from __future__ import annotations

import argparse
import gettext
import gzip
import html
import io
import random
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

_HANDBOOK = "debian-handbook/usr/share/doc/debian-handbook/html/"
_GNOME = "gnome-user-docs/usr/share/help/"
_OFFICE = "libreoffice-help-{}/usr/share/libreoffice/help"
_FORTUNES = "/usr/share/games/fortunes"

# language -> folders below ROOT, and which files
SOURCES: dict[str, list[tuple[str, str]]] = {
    "english": [
        (_HANDBOOK + "en-US", "*.html"),
        (_GNOME + "C", "*.page"),
        (_OFFICE.format("en-us"), "*.html"),
        ("fortunes" + _FORTUNES, "*"),
        ("fortunes-min" + _FORTUNES, "*"),
    ],
    "german": [
        (_HANDBOOK + "de-DE", "*.html"),
        (_GNOME + "de", "*.page"),
        (_OFFICE.format("de"), "*.html"),
        ("fortunes-de" + _FORTUNES, "*"),
        ("manpages-de", "*.gz"),
    ],
    "french": [
        (_HANDBOOK + "fr-FR", "*.html"),
        (_GNOME + "fr", "*.page"),
        (_OFFICE.format("fr"), "*.html"),
        ("manpages-fr", "*.gz"),
    ],
    "chinese": [
        ("debian-reference-zh-cn", "*.html"),
        (_HANDBOOK + "zh-CN", "*.html"),
        (_GNOME + "zh_CN", "*.page"),
        (_OFFICE.format("zh-cn"), "*.html"),
        ("manpages-zh/usr/share/man/zh_CN", "*.gz"),
        ("fortunes-zh" + _FORTUNES, "*"),
    ],
    "hindi": [
        (_GNOME + "hi", "*.page"),
        (_OFFICE.format("hi"), "*.html"),
        ("libreoffice-l10n-hi", "*.mo"),
    ],
    "code": [
        ("libpython3.11-stdlib/usr/lib/python3.11", "*.py"),
        ("golang-1.19-src/usr/share/go-1.19/src", "*.go"),
        ("linux-libc-dev", "*.h"),
        ("libjs-jquery", "jquery.js"),
    ],
}
MAX_LETTERS = 1_600_000

_SCRIPTS = {"hindi": "DEVANAGARI", "chinese": "CJK"}
# What German and French have hardly any of: a paragraph with many of them was not translated.
_ENGLISH = frozenset("the is and of to that for it with this be are you can not by from".split())
_HIDDEN = re.compile(r"(?s)<(script|style|head|svg|info)\b.*?</\1>")
_BLOCKS = re.compile(r"</?(p|h\d|li|tr|title|div|br|td|pre|item|note|section)\b[^>]*>")
_TAGS = re.compile(r"<[^>]+>")
_ROFF = re.compile(r"\\f(\[[^\]]*\]|\(..|.)|\\[&/,|^c*]|\\s[-+]?\d")


def plain_text(path: Path) -> str:
    """What a page of HTML, a manual page, a message catalogue or a text says."""
    data = path.read_bytes()
    if path.suffix == ".mo":
        catalogue = gettext.GNUTranslations(io.BytesIO(data))
        messages: dict[object, str] = vars(catalogue)["_catalog"]
        return "\n".join(text for text in messages.values() if len(text) > 20)
    if path.suffix == ".gz":
        lines = gzip.decompress(data).decode("utf-8", "ignore").split("\n")
        text = "\n".join(line for line in lines if not line.startswith((".", "'")))
        return _ROFF.sub("", text).replace("\\-", "-").replace("\\(aq", "'").replace("\\ ", " ")
    text = data.decode("utf-8", "ignore")
    if path.suffix not in (".html", ".page"):
        return text
    return html.unescape(_TAGS.sub("", _BLOCKS.sub("\n", _HIDDEN.sub("", text))))


def _written_in(script: str, line: str) -> bool:
    letters = [c for c in line if c.isalpha() or unicodedata.category(c) in ("Mn", "Mc")]
    inside = sum(unicodedata.name(c, "").startswith(script) for c in letters)
    return bool(letters) and inside >= 0.6 * len(letters)


def _is_of(language: str, line: str) -> bool:
    if language in _SCRIPTS:
        return _written_in(_SCRIPTS[language], line)
    words = re.findall(r"\w+", line.lower())
    return sum(word in _ENGLISH for word in words) <= 0.1 * len(words)


def paragraphs(language: str, files: list[Path]) -> Iterator[str]:
    """Lines of the files that are worth reading; of code all."""
    seen: set[str] = set()
    for path in files:
        for line in plain_text(path).split("\n"):
            if language == "code":
                yield line
                continue
            clean = re.sub(r"\s+", " ", line).strip()
            if len(clean) < 2 or (len(clean) > 12 and clean in seen):
                continue
            if language == "english" or _is_of(language, clean):
                seen.add(clean)
                yield clean


def text_of(language: str, folder: Path, pattern: str) -> str:
    """The text of a source, its files in an order drawn once."""
    files = sorted(p for p in folder.rglob(pattern) if p.is_file() and not p.is_symlink())
    files = [
        p for p in files if p.suffix != ".dat" and not (language == "code" and "test" in p.name)
    ]
    random.Random(1).shuffle(files)
    found, letters = [], 0
    for line in paragraphs(language, files):
        found.append(line)
        letters += len(line) + 1
        if letters > MAX_LETTERS:
            break
    return "\n".join(found)[:MAX_LETTERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    for language, sources in SOURCES.items():
        (args.out / language).mkdir(parents=True, exist_ok=True)
        for number, (folder, pattern) in enumerate(sources):
            text = text_of(language, args.root / folder, pattern)
            (args.out / language / f"{number}.txt").write_text(text, encoding="utf-8")
            print(f"{language}: {len(text):9,} letters of {folder}")


if __name__ == "__main__":
    main()
