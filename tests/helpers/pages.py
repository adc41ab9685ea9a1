"""Definitions of docs/model_files.py and docs/models.py: small models of mlx-lm, and the rows of the pages."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).parents[2] / "docs"

MODELS: dict[str, Any] = {}
sys.path.append(str(_DOCS))  # as for a script there
try:
    for _name in ("model_files", "models"):
        MODELS |= runpy.run_path(str(_DOCS / f"{_name}.py"))
finally:
    sys.path.remove(str(_DOCS))
