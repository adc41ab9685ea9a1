"""Limits on errors stand in helpers/tolerances.py, and what they are follows from the types."""

import re

import mlx.core as mx
import pytest
from helpers import tolerances
from helpers.support import TESTS

from mlx_mittens import specs

# A number in the place of a limit, in comparisons of numpy's, of mx's and of those that tests share.
LIMIT = re.compile(
    r"\b[ar]tol=[\d.]+e-|assert_near\([^\n]*, [\d.]+e-\d+\)$|error\([^\n]*\) <=? [\d.]+e-|\d \* specs\.EPSILON\[", re.M
)


def test_no_test_has_a_limit_of_its_own():
    found = []
    for path in TESTS.rglob("*.py"):
        if path.name not in ("tolerances.py", "test_tolerances.py"):
            found += [f"{path.relative_to(TESTS)}: {m[0]}" for m in LIMIT.finditer(path.read_text())]
    assert not found, "limits belong into helpers/tolerances.py, with what they follow from: " + "; ".join(found)


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
