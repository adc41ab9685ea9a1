"""Vectors of truths, and casts of vectors, as Metal has them, in LLVM's text before any optimization.

A comparison of vectors gives integers in clang's C++, which are -1 where it is true; in Metal it gives a vector of
bool, so that `float4(a < b)` is 1 there. And clang puts a byte into a vector of bits where an element of it is written,
which is no LLVM.

A cast of a vector to another of its size takes the bits in clang's C++; in Metal it converts the elements. That of
unsigned integers is written out in `rewrite`, which sees the name of the type, and here that of others, by an alias.
"""

from __future__ import annotations

import re

_NAME = r'%[\w.$-]+|%"[^"]*"'
_COMPARED = re.compile(r"^(  \S+ = )sext( <\d+ x i1> )", re.M)
# `mask ? a : b` asks for the sign of a mask.
_SIGN = re.compile(
    rf"^(?P<head>  (?P<name>{_NAME}) = icmp )slt(?P<rest> <\d+ x i\d+> .*, zeroinitializer\b.*)$"
    r"(?=(?:\n.*){0,3}\n  \S+ = select <\d+ x i1> (?P=name),)",
    re.M,
)
_WRITTEN = re.compile(
    rf"^(?P<head>  (?:{_NAME}) = insertelement <\d+ x i1> .+, )i8 (?P<value>[^,]+)(?P<lane>, i\d+ .+)$", re.M
)
_CAST = re.compile(
    r"^(?P<head>  \S+ = )bitcast (?P<rest><(?P<count>\d+) x (?P<source>i\d+|half|bfloat|float)> \S+ to "
    r"<(?P=count) x (?P<target>i\d+|half|bfloat|float)>.*)$",
    re.M,
)
# A vector in a kernel's text, other than the positions in its signature.
_VECTOR = re.compile(
    r"\b(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float)[234]\b(?!\s+\w+\s*\[\[)|\bvec\s*<|[234]x[234]"
)


def has_vectors(text: str) -> bool:
    """Whether a kernel's text names a vector, or a type that may hold some."""
    return _VECTOR.search(text) is not None


def with_truths(text: str) -> str:
    """LLVM's text with 1 for what is true in a vector."""
    count = 0

    def written(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        name = f"%mittens.truth.{count}"
        return f"  {name} = trunc i8 {match['value']} to i1\n{match['head']}i1 {name}{match['lane']}"

    def cast(match: re.Match[str]) -> str:
        integers = match["source"][0] == "i", match["target"][0] == "i"
        operation = {(True, False): "sitofp", (False, True): "fptosi"}.get(integers)
        return f"{match['head']}{operation} {match['rest']}" if operation else match[0]

    text = _CAST.sub(cast, text)
    text = _SIGN.sub(lambda match: f"{match['head']}ne{match['rest']}", text)
    return _WRITTEN.sub(written, _COMPARED.sub(r"\1zext\2", text))
