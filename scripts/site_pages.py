"""What mkdocs.yml needs beside its plugins: pages at the top of the repository, links, docstrings.

Pages link by paths of the repository, which GitHub follows. A link to another page becomes a link
of the site, checked as all are; a link to any other file leads to the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ICON = "python/bitnet_ops/server/page/icon.svg"
TOP = ("FORMAT.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
# code is left alone; then `](target)` and `[name]: target` of links into the repository
PARTS = re.compile(
    r"(?P<code>^```.*?^```$|`[^`\n]*`)|(?P<before>\]\(|^\[[^\]]+\]: )(?P<target>[^)\s:]+)(?=[)\s])",
    re.MULTILINE | re.DOTALL,
)


def on_files(files: Files, config: Any) -> Files:
    for name in TOP:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "icon.svg", abs_src_path=str(ROOT / ICON)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = page.file.src_uri
    if source == "README.md":  # alone in its tab
        page.meta["hide"] = ["navigation"]
    boost = 4 if source.startswith("guide/") else 0.5 if source.startswith(("notes/", "CH")) else 1
    page.meta["search"] = {"boost": boost}
    folder = (ROOT / source if source in TOP else ROOT / "docs" / source).parent
    address = config.extra["social"][0]["link"]

    def link(found: re.Match[str]) -> str:
        path, sharp, anchor = (found["target"] or "").partition("#")
        if found["code"] or not path:
            return found[0]
        target = Path(os.path.normpath(folder / path)).relative_to(ROOT).as_posix()
        within = target if target in TOP else target.removeprefix("docs/")
        joined = files.get_file_from_path(within)
        elsewhere = joined is None or joined.inclusion.is_excluded()
        if elsewhere and (ROOT / target).exists():
            kind = "tree" if (ROOT / target).is_dir() else "blob"
            return f"{found['before']}{address}/{kind}/main/{target}{sharp}{anchor}"
        uri = os.path.relpath(within, os.path.dirname(source) or ".")
        return f"{found['before']}{uri}{sharp}{anchor}"

    return PARTS.sub(link, markdown)


class Sections(griffe.Extension):
    """Docstrings put no blank line between Args, Returns and Raises; the reader wants one."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^(?=(Args|Returns|Raises):$)", "\n", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r"^Source: ", "\n**Source**: ", text, flags=re.M)
