"""Definitions of docs/models.py: the small models of mlx-lm's files, and the rows of the pages."""

from __future__ import annotations

import runpy
from pathlib import Path

MODELS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "models.py"))
