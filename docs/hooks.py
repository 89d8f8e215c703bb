"""Pages from outside of this folder become part of the site, and links to them stay whole.

On GitHub ``docs/results.md`` links to ``../benchmarks/README.md``; in the site that file is the
page ``benchmarks.md``.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
#: Files of the repository, and the pages that they become.
PAGES = {"benchmarks/README.md": "benchmarks.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"\]\(([^)#:\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links of a page at the pages of the site."""
    place = page.file.src_uri
    source = {page: file for file, page in PAGES.items()}.get(place, f"docs/{place}")

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        inside = PAGES.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(inside, posixpath.dirname(place) or '.')}"

    return LINK.sub(moved, markdown)
