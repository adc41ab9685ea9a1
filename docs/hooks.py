"""Hooks of mkdocs: pages and files of the site for the figures in bench/results, which pages cite."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "bench/results"
# Folders of the repository that links of pages lead to, by where the site has them.
_MOVED = {"docs/": "", f"{RESULTS}/": f"{RESULTS}/"}
_LINK = re.compile(r"(\]\()([^)\s:]+?)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    for path in sorted((ROOT / RESULTS).glob("*.*")):
        files.append(File.generated(config, f"{RESULTS}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links within the repository become links within the site."""
    place = page.file.src_uri
    folder = posixpath.dirname(place if place.startswith(RESULTS) else f"docs/{place}")

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        for here, there in _MOVED.items():
            if target.startswith(here):
                site = there + target.removeprefix(here)
                return match[1] + posixpath.relpath(site, posixpath.dirname(place) or ".") + match[3]
        return match[0]

    return _LINK.sub(moved, markdown)
