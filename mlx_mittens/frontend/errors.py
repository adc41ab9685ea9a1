"""What is said of a kernel that does not compile."""

from __future__ import annotations

from dataclasses import dataclass


class CompileError(RuntimeError):
    """A .metal text that its compiler refused: the file, the kernel if one was asked for, and the compiler's words."""

    def __init__(self, file: str, kernel: str | None, log: str):
        self.file = file
        self.kernel = kernel
        self.log = log.strip()
        what = f"kernel {kernel!r} of {file}" if kernel else file
        super().__init__(f"{what} does not compile:\n{self.log}")


@dataclass(frozen=True, order=True)
class Problem:
    """Something that a Mac's compiler would refuse."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"
