"""Limits on errors stand in helpers/tolerances.py, and their values follow from the types."""

import ast
from collections.abc import Iterator

import mlx.core as mx
import pytest
from helpers import tolerances
from helpers.support import TESTS

from mlx_mittens import specs

# Comparisons of numpy's, of mx's, of Python's and of the tests' helpers; limits come after two values, or by name.
# pytest.approx is none of them: it compares predicted times and counts of instructions, not results of kernels.
COMPARISONS = ("allclose", "assert_allclose", "isclose", "assert_near")
BY_DIGITS = (
    "assert_almost_equal",
    "assert_array_almost_equal",
    "assert_array_almost_equal_nulp",
    "assert_array_max_ulp",
)
KEYWORDS = ("rtol", "atol", "rel_tol", "abs_tol", "tolerance")
SMALL = 0.1  # no limit is larger, and no factor of one smaller


def name_of(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def value_of(node: ast.AST) -> float | None:
    """The value of a number, a power or a quotient of numbers."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = value_of(operand)
            return None if value is None else -value
        case ast.BinOp(left=left, op=ast.Pow() | ast.Div() as op, right=right):
            a, b = value_of(left), value_of(right)
            if a is None or b is None:
                return None
            return a**b if isinstance(op, ast.Pow) else a / b
    return None


def has_number(limit: ast.expr) -> bool:
    """Whether a limit is a number of its own, or a multiple of one, and not one of the names in tolerances.py."""
    for node in ast.walk(limit):
        value = value_of(node)
        if value is not None and 0 < abs(value) < SMALL:
            return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):  # a number of units
            sides = node.left, node.right
            units = [side for side in sides if isinstance(side, ast.Subscript) and name_of(side.value) == "EPSILON"]
            if units and any(value_of(side) is not None for side in sides):
                return True
    return False


def is_error(value: ast.expr) -> bool:
    names = [name_of(node) for node in ast.walk(value)]
    return any(name in ("abs", "fabs", "absolute", "norm") or "error" in name for name in names)


def limits_in(text: str) -> Iterator[str]:
    """The expressions of a test file that have a number in the place of a limit."""
    for node in ast.walk(ast.parse(text)):
        limits: list[ast.expr] = []
        if isinstance(node, ast.Call):
            name = name_of(node.func)
            if name in BY_DIGITS:
                yield ast.unparse(node)
            if name != "approx":
                limits = [word.value for word in node.keywords if word.arg in KEYWORDS]
            if name in COMPARISONS:
                limits += node.args[2:]
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, sign, right in zip(sides, node.ops, sides[1:]):
                below, above = (right, left) if isinstance(sign, ast.Gt | ast.GtE) else (left, right)
                if isinstance(sign, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and is_error(below) and not is_error(above):
                    limits.append(above)
        if any(map(has_number, limits)):
            yield ast.unparse(node)


def test_no_test_has_a_limit_of_its_own():
    found = []
    for path in TESTS.rglob("*.py"):
        if path.name not in ("tolerances.py", "test_tolerances.py"):
            found += [f"{path.relative_to(TESTS)}: {limit}" for limit in limits_in(path.read_text())]
    assert not found, "limits belong into helpers/tolerances.py, with what they follow from:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "np.testing.assert_allclose(a, b, rtol=1e-3)",
        "np.testing.assert_allclose(a, b, 1e-3)",
        "np.testing.assert_allclose(a, b, rtol=0, atol=0.001 * np.abs(b).max())",
        "assert mx.allclose(a, b, 1e-5, 1e-3)",
        "mx.allclose(a, b, rtol=SUM, atol=2**-10)",
        "math.isclose(a, b, abs_tol=1 / 1000)",
        "assert_near(\n    a, b, 'b', 1e-3\n)",
        "assert_near(a, b, 'b', tolerance=1e-3)",
        "np.testing.assert_array_almost_equal(a, b, 3)",
        "assert abs(a - b) < 1e-3",
        "assert 1e-3 > np.abs(a - b).max()",
        "assert (np.abs(a - b) <= 2.0**-23 * (16 * terms + size)).all()",
        "assert specs.error(a, exact) <= 1e-6",
        "assert largest_error < 5e-4",
        "np.testing.assert_allclose(a, b, rtol=3 * specs.EPSILON[dtype])",
    ],
)
def test_a_limit_is_found(text):
    assert len(list(limits_in(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "np.testing.assert_allclose(a, b, rtol=0, atol=2 * LAYERS * scale)",
        "assert mx.allclose(a, b, SUMS, of_terms(100))",
        "np.testing.assert_allclose(specs.dequantized(*triple, 32, bits), 0.05 * b, rtol=ROUNDINGS)",
        "assert specs.error(a, exact) <= tolerances.SUM",
        "assert specs.error(wrong, exact) > 0.02",
        "assert seconds() - plain < 2e-6",
        "assert times == pytest.approx(3.5, rel=0.01)",
    ],
)
def test_what_is_no_limit_is_not_found(text):
    assert not list(limits_in(text))


def test_limits_of_16_bit_types_are_of_their_roundings():
    """One unit, and less than two: the next but one number would not pass."""
    for limit, dtype in ((tolerances.FLOAT16, mx.float16), (tolerances.BFLOAT16, mx.bfloat16)):
        assert specs.EPSILON[dtype] < limit < 1.1 * specs.EPSILON[dtype]
    assert 2 * specs.EPSILON[mx.float16] < tolerances.FLOAT16_TWICE < 2.1 * specs.EPSILON[mx.float16]


@pytest.mark.parametrize(
    "factor, passes", [(1.0, True), (1 + 0.9e-4, True), (1 + 1.1e-4, False), (float("nan"), False)]
)
def test_assert_near_sees_what_is_off(factor, passes):
    b = mx.array([1.0, -2.0, 0.5])
    if passes:
        tolerances.assert_near(b * factor, b, "b")
    else:
        with pytest.raises(AssertionError, match="b: "):
            tolerances.assert_near(b * factor, b, "b")


def test_a_product_of_another_type_or_size_is_wrong():
    exact = specs.Exact(specs.widen(mx.array([[1.0, 3.0]])))
    tolerances.assert_product_right(mx.array([[1.0, 3.0]], mx.float16), exact, mx.float16)
    for wrong in (mx.array([[1.0, 3.0]]), mx.array([[1.0, 3.01]], mx.float16)):
        with pytest.raises(AssertionError):
            tolerances.assert_product_right(wrong, exact, mx.float16)
