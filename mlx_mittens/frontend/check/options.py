"""How a file that is checked is compiled."""

from __future__ import annotations

from dataclasses import dataclass

STANDARDS = {"metal3.1": 310, "metal3.2": 320, "metal4.0": 400}


@dataclass(frozen=True)
class Options:
    """How a file is compiled: folders of headers, macros as NAME or NAME=VALUE, and the version of the language."""

    include: tuple[str, ...] = ()
    define: tuple[str, ...] = ()
    standard: str = "metal3.1"

    @property
    def version(self) -> int:
        return STANDARDS[self.standard]


DEFAULTS = Options()
