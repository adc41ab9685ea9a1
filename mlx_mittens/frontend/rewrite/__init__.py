"""From Metal's dialect to the C++ that clang takes, by passes over the tokens of a preprocessed text.

Types and address spaces need no rewriting: the standard library defines them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from .arrays import private_arrays, threadgroup_arrays
from .attributes import cut_attributes
from .constants import constants, function_constant_tests
from .draft import Draft
from .kernels import kernels
from .literals import inexact_expressions, inexact_numbers, numbers, strings
from .members import mark_threadgroup_constructors, member_functions
from .rounds import count_rounds
from .spaces import assignments, parameters
from .translation import Translation
from .truths import refuse_truths_in_memory
from .vectors import casts, constructors, named_casts, types

Pass = Callable[[Draft], None]
Passes = tuple[Pass, ...]

# Each pass in the order in which one relies on another: attributes go first, and kernels before their parameters.
_EVERY: Passes = (
    refuse_truths_in_memory,
    cut_attributes,
    mark_threadgroup_constructors,
    member_functions,
    count_rounds,
    kernels,
    threadgroup_arrays,
    private_arrays,
    constants,
    parameters,
    function_constant_tests,
    constructors,
    casts,
    named_casts,
    types,
    strings,
    numbers,
    inexact_numbers,
    inexact_expressions,
    assignments,
)
_OF_CHECKS = {mark_threadgroup_constructors, inexact_numbers, inexact_expressions}
_ON_REQUEST = {count_rounds, private_arrays, named_casts}

TO_CHECK: Passes = tuple(one for one in _EVERY if one is not numbers and one not in _ON_REQUEST)


@functools.cache
def to_run(*more: Pass) -> Passes:
    """The passes of a text that is to run, with those asked for: `count_rounds`, `private_arrays`, `named_casts`."""
    return tuple(one for one in _EVERY if one in more or one not in _ON_REQUEST | _OF_CHECKS)


def rewrite(text: str, passes: Passes, constants: dict[int, str] | None = None) -> Translation:
    """Rewrites preprocessed Metal for clang.

    Args:
        text: A .metal file, preprocessed, line markers included.
        passes: The passes, in order.
        constants: Values of function constants by index, as they are written in C++; None leaves them open.

    Raises:
        RewriteError: If the text has a mistake that a pass stumbles over.
    """
    draft = Draft(text, constants)
    for each in passes:
        each(draft)
    draft.result.text = draft.written()
    return draft.result
