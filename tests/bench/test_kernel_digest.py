"""Digests of kernels and of their translators: they change with the code, not with its comments."""

from mlx_mittens.bench import kernel_digest
from mlx_mittens.frontend.read import sources


def test_comments_and_layout_are_not_code():
    text = '#pragma once\n#line 3 "a.h"\nint x = 1;  // one\n/* two\nlines */ float y;\n'
    assert sources.tokens(text) == sources.tokens("int x\n  = 1;\nfloat y;")
    assert sources.tokens(text) != sources.tokens(text.replace("= 1", "= 2"))


def test_strings_are_code():
    assert sources.tokens('f("// a");') != sources.tokens('f("// b");')


def test_docstrings_are_not_code():
    text = 'def f(x):\n    """One."""\n    return x  # again\n'
    assert kernel_digest.code_of(text) == kernel_digest.code_of('"""A module."""\ndef f(x):\n    return (x)\n')
    assert kernel_digest.code_of(text) != kernel_digest.code_of(text.replace("return x", "return -x"))


def test_a_function_of_a_docstring_alone():
    assert kernel_digest.code_of('def f():\n    """Nothing."""\n')


def test_others_count():
    assert kernel_digest.digest("one") != kernel_digest.digest("two")
