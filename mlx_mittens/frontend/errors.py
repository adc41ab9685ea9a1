"""The message about a kernel that does not compile."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORDS = re.compile(r"(?:kernel '(.*?)' of )?(.*?) does not compile:\n(.*)", re.S)


class CompileError(RuntimeError):
    """A .metal text that its compiler refused: the file, the kernel if one was asked for, and the compiler's words.

    Example:
        >>> kernel = mm.simulator.metal_kernel("halved", ["x"], ["y"], "y[0] = x[0] / two;")
        >>> sizes = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)]}
        >>> try:
        ...     mx.eval(kernel(inputs=[mx.ones(1)], output_dtypes=[mx.float32], **sizes))
        ... except mm.frontend.CompileError as error:
        ...     print(error.file, error.log.splitlines()[0])
        halved.metal halved.metal:1:15: error: use of undeclared identifier 'two'
    """

    def __init__(self, file: str, kernel: str | None = None, log: str | None = None):
        if log is None:  # copied, or passed on by C++: one that is made of the whole message
            known = _WORDS.fullmatch(file)
            kernel, file, log = known.groups() if known else (None, "a kernel", file)
        self.file = file
        self.kernel = kernel
        self.log = log.strip()
        what = f"kernel {kernel!r} of {file}" if kernel else file
        super().__init__(f"{what} does not compile:\n{self.log}")


ERROR, WARNING, NOTE, UNCOVERED = "error", "warning", "note", "not covered"


@dataclass(frozen=True, order=True)
class Problem:
    """Something that a Mac's compiler would refuse, or that is to be known of a text.

    The severity is "error", "warning" (it compiles, and cannot be launched), "note" (it compiles and runs) or "not
    covered" (it is not known whether it does).
    """

    file: str
    line: int
    what: str
    column: int = 0
    severity: str = ERROR

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"
