"""Vectors of truths, and casts of vectors, as Metal has them, in LLVM's text before any optimization.

A comparison of vectors gives integers in clang's C++, which are -1 where it is true; in Metal it gives a vector of
bool, so that `float4(a < b)` is 1 there. And clang puts a byte into a vector of bits where an element of it is written,
which is no LLVM.

A cast of a vector to another of its size takes the bits in clang's C++; in Metal it converts the elements. Here no
integer has a sign any more: `rewrite` writes out casts to types that it knows by name, and where some are left those to
aliases and template parameters too. The rest is converted here, with integers taken as signed.
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
    r"^(?P<head>  \S+ = )bitcast (?P<rest><(?P<count>\d+) x (?P<source>i\d+|half|bfloat|float)> (?P<value>\S+) to "
    r"<(?P=count) x (?P<target>i\d+|half|bfloat|float)>(?P<tail>.*))$",
    re.M,
)
# A vector in a kernel's text, other than the positions in its signature.
_VECTOR = re.compile(
    r"\b(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float)[234]\b(?!\s+\w+\s*\[\[)|\bvec\s*<|[234]x[234]"
)


def has_vectors(text: str) -> bool:
    """Whether a kernel's text names a vector, or a type that may hold some."""
    return _VECTOR.search(text) is not None


def has_casts(text: str) -> bool:
    """Whether LLVM's text takes the bits of a vector for others, where one of the two is of integers."""
    return any((match["source"][0] == "i") != (match["target"][0] == "i") for match in _CAST.finditer(text))


def with_truths(text: str) -> str:
    """LLVM's text with 1 for true components of a vector."""
    count = 0

    def written(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        name = f"%mittens.truth.{count}"
        return f"  {name} = trunc i8 {match['value']} to i1\n{match['head']}i1 {name}{match['lane']}"

    def cast(match: re.Match[str]) -> str:
        nonlocal count
        integers = match["source"][0] == "i", match["target"][0] == "i"
        operation = {(True, False): "sitofp", (False, True): "fptosi"}.get(integers)
        if operation:
            return f"{match['head']}{operation} {match['rest']}"
        if {match["source"], match["target"]} != {"half", "bfloat"}:
            return match[0]
        count += 1
        name, wide = f"%mittens.wide.{count}", f"<{match['count']} x float>"
        value, tail = match["value"], match["tail"]
        widened = f"  {name} = fpext <{match['count']} x {match['source']}> {value} to {wide}{tail}\n"
        return f"{widened}{match['head']}fptrunc {wide} {name} to <{match['count']} x {match['target']}>{tail}"

    text = _CAST.sub(cast, text)
    text = _SIGN.sub(lambda match: f"{match['head']}ne{match['rest']}", text)
    return _WRITTEN.sub(written, _COMPARED.sub(r"\1zext\2", text))
