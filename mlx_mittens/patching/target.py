"""A function of another package that the patch takes the place of: where it is, and whether it is known."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from .digests import digest, plain

importing: set[str] = set()  # modules that are being imported
executed: set[str] = set()  # modules that were imported under the patch

Attempt = Callable[..., Any]  # an op's result, or None where the original is to be called


class PatchError(RuntimeError):
    """A function that the patch takes the place of is not where it was, or takes other arguments.

    Example:
        >>> try:
        ...     mm.patch()
        ... except mm.PatchError as error:  # mlx-lm is of another version: the message says which switch leaves it out
        ...     print(error)
        >>> mm.unpatch()
    """


@dataclass(frozen=True)
class Target:
    """A function of another package, and the op that stands in for it."""

    switch: str  # its name in patch()
    op: str  # its name in stats()
    module: str  # where the function is
    path: str  # and its name there, with dots
    attempt: Attempt
    parameters: tuple[str, ...] = ()  # of a Python function, which must be these; empty for mx's own
    optional: bool = False  # a package that need not be installed; patched once it is imported
    newer: bool = False  # only later releases of mlx have it: it is left alone where it is not there
    partial: bool = False  # some calls are the original's in strict mode too
    shared: bool = False  # the package's other modules import it by name
    text: str = ""  # the digest of the one function that is known here; another is left alone
    rests_on: tuple[str, ...] = ()  # functions of the same owner that digests are of instead, one behind the other
    needs: tuple[str, ...] = ()  # other switches, without which it is left alone

    @property
    def name(self) -> str:
        """The function's full name."""
        return f"{self.module}.{self.path}"

    def owner(self) -> tuple[Any, str]:
        """The object that holds the function, and the name there.

        Raises:
            PatchError: It is not there, or takes other arguments than those known.
        """
        *parents, leaf = self.path.split(".")
        try:
            # import_module waits for a thread that imports the module. One that has executed it waits for the patch.
            there = sys.modules.get(self.module) if self.module in executed else None
            owner = functools.reduce(getattr, parents, there or importlib.import_module(self.module))
            function = getattr(owner, leaf)
        except (ImportError, AttributeError) as error:
            raise PatchError(self._complaint(f"is not there ({error})")) from error
        if self.parameters and not hasattr(function, "__wrapped__"):
            found = tuple(inspect.signature(function).parameters)
            if found != self.parameters:
                raise PatchError(
                    self._complaint(f"takes ({', '.join(found)}): expected ({', '.join(self.parameters)})")
                )
        return owner, leaf

    def importers(self, function: Any) -> list[Any]:
        """The package's modules that hold a function under the target's name."""
        if not self.shared:
            return []
        inside = f"{self.module.rpartition('.')[0]}."
        modules = [module for name, module in list(sys.modules.items()) if name.startswith(inside)]
        return [module for module in modules if getattr(module, "__dict__", {}).get(self.path) is function]

    def is_wanted(self, switches: Collection[str]) -> bool:
        """Whether the switches that are on ask for it."""
        return self.switch in switches and all(name in switches for name in self.needs)

    def is_loaded(self) -> bool:
        """Whether its module has been imported; the others are imported when they are patched."""
        if self.newer and not self._is_there():
            return False
        return not self.optional or (self.module in sys.modules and self.module not in importing)

    def _is_there(self) -> bool:
        *parents, leaf = self.path.split(".")
        owner: Any = importlib.import_module(self.module)
        for name in parents:
            owner = getattr(owner, name, None)
        return hasattr(owner, leaf)

    def is_known(self) -> bool:
        """Whether the function is the one that it has to be, where just one will do."""
        if not self.text:
            return True
        try:
            owner, leaf = self.owner()
        except PatchError:
            return False
        functions = [getattr(owner, name, None) for name in self.rests_on or (leaf,)]
        return " ".join(map(digest, map(plain, functions))) == self.text

    def _complaint(self, what: str) -> str:
        import importlib.metadata

        package = self.module.split(".")[0].replace("_", "-")
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "of unknown version"
        return (
            f"[patch] {self.name} {what}; installed is {package} {version}. "
            f"mm.patch({self.switch}=False) leaves it alone."
        )
