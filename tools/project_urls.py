"""Writes `project.urls` of a public repository into pyproject.toml, for a release that is built from there.

python tools/project_urls.py https://github.com/OWNER/NAME

The clone itself has none: it does not know which public repository it is in. The workflow `wheels` runs this first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from urllib.parse import urlsplit

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def urls(repository: str) -> dict[str, str]:
    """The links of the package's page, by the names that PyPI knows.

    Raises:
        ValueError: That is no address of a repository.
    """
    parts = urlsplit(repository)
    if parts.scheme != "https" or not parts.netloc or len(parts.path.strip("/").split("/")) != 2:
        raise ValueError(f"{repository!r} is no address of a repository: expected https://HOST/OWNER/NAME")
    base = repository.rstrip("/")
    return {
        "Source": base,
        "Documentation": f"{base}/blob/HEAD/docs/index.md",
        "Changelog": f"{base}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{base}/issues",
    }


def written(text: str, repository: str) -> str:
    """The text of pyproject.toml with the links.

    Raises:
        ValueError: It has links, or that is no address of a repository.
    """
    if "[project.urls]" in text:
        raise ValueError("pyproject.toml has project.urls")
    lines = [f'{name} = "{url}"' for name, url in urls(repository).items()]
    return "\n".join([text.rstrip("\n"), "", "[project.urls]", *lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repository", metavar="URL", help="of the repository, as https://github.com/OWNER/NAME")
    arguments = parser.parse_args()
    try:
        PYPROJECT.write_text(written(PYPROJECT.read_text(), arguments.repository))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
