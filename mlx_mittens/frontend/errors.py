"""The error of a kernel that does not compile."""

from __future__ import annotations


class CompileError(RuntimeError):
    """A .metal text that its compiler refused: the file, the kernel if one was asked for, and the compiler's words."""

    def __init__(self, file: str, kernel: str | None, log: str):
        self.file = file
        self.kernel = kernel
        self.log = log.strip()
        what = f"kernel {kernel!r} of {file}" if kernel else file
        super().__init__(f"{what} does not compile:\n{self.log}")
