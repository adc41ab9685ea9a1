"""The patch's replacement of a function, by itself: the type in csrc/patch/function_wrapper.cpp."""

import ast
import functools
import gc
import inspect
import pickle
import weakref

import pytest

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.specs import OPS


def original(*args, **kwargs):
    """What was there before."""
    return "original", args, kwargs


def function_wrapper(attempt=None, strict=False):
    made = functools.wraps(original)(_ext.FunctionWrapper("an_op", original))
    made.attempt, made.strict = attempt, strict
    return made


@pytest.mark.parametrize("attempt", [None, lambda *args, **kwargs: None])
def test_the_original_gets_the_arguments_as_they_came(attempt):
    assert function_wrapper(attempt)(1, 2, a=3) == ("original", (1, 2), {"a": 3})
    assert function_wrapper(attempt)() == ("original", (), {})


def test_the_original_can_be_replaced():
    made = function_wrapper()
    assert made.original is original
    made.original = lambda *args: args
    assert made(1, 2) == (1, 2)
    del made.original
    with pytest.raises(TypeError, match="the original function was deleted"):
        made()


def test_what_an_attempt_gives_is_the_result():
    assert function_wrapper(lambda x, *, y: x + y)(1, y=2) == 3
    assert function_wrapper(lambda: 0)() == 0  # false, but not None


def test_of_an_attempts_errors_only_a_type_error_goes_to_the_original():
    mm.stats(reset=True)
    assert function_wrapper(lambda: None)(5) == ("original", (5,), {})
    assert mm.stats()["an_op"]["mx"] == {"arguments of other types": 1}
    with pytest.raises(ZeroDivisionError):
        function_wrapper(lambda x: x / 0)(1)


def test_an_original_may_fail_too():
    made = _ext.FunctionWrapper("an_op", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made()


def test_strict_is_an_error_once_the_original_was_called():
    with pytest.raises(
        RuntimeError, match=r"\[an_op\] strict patch: no kernel of mlx_mittens covers arguments of other"
    ):
        function_wrapper(lambda: None, strict=True)(1)
    assert function_wrapper(lambda: 2, strict=True)() == 2


def test_in_a_class_it_is_a_method():
    class Owner:
        method = function_wrapper(lambda self, x: (self, x))

    owner = Owner()
    assert owner.method(1) == (owner, 1)
    assert Owner.method(owner, 2) == (owner, 2)


def test_it_looks_like_the_original():
    made = function_wrapper()
    assert (made.__name__, made.__doc__, made.__wrapped__) == ("original", "What was there before.", original)
    assert inspect.signature(made) == inspect.signature(original)


def test_its_repr_says_what_it_is():
    assert repr(function_wrapper()) == "<function an_op of mlx_mittens>"


@pytest.mark.parametrize("name", ["softmax", "gemv", "scaled_dot_product_attention", "block_dequantize"])
def test_an_op_is_the_extensions_function_as_its_declaration_says(name):
    op = getattr(mm, name)
    declaration = op.__wrapped__
    assert isinstance(op, _ext.FunctionWrapper) and inspect.isfunction(declaration)
    assert op.__doc__ == declaration.__doc__ and "Args:" in op.__doc__
    assert inspect.signature(op) == inspect.signature(declaration)
    assert inspect.isroutine(op)  # for help()
    assert pickle.loads(pickle.dumps(op)) is op
    assert op.__annotations__ == declaration.__annotations__ != {}
    assert weakref.ref(op)() is op


DECLARED = [name for name in mm.__all__ if isinstance(getattr(mm, name), _ext.FunctionWrapper)]


@pytest.mark.parametrize("name", DECLARED)
def test_a_declaration_is_what_the_extension_takes(name):
    declared = inspect.signature(getattr(mm, name)).parameters
    first_line = getattr(_ext, name).__doc__.splitlines()[0]
    defined = ast.parse(f"def {first_line}: ...").body[0].args
    unnamed = [p.name for p in declared.values() if p.kind == p.POSITIONAL_ONLY]
    named = [argument.arg for argument in defined.kwonlyargs]
    assert list(declared) == unnamed + [a.arg for a in defined.args[len(unnamed) :]] + named
    assert [a.arg for a in defined.args[: len(unnamed)]] == [f"arg{i}" for i in range(len(unnamed))]  # have no name
    assert [p.name for p in declared.values() if p.kind == p.KEYWORD_ONLY] == named
    optional = [p for p in declared.values() if p.kind != p.KEYWORD_ONLY and p.default is not p.empty]
    for parameter, default in zip(optional, defined.defaults, strict=True):
        if parameter.name != "dtype":  # an object of MLX's, which the extension knows by None
            assert parameter.default == ast.literal_eval(default)
    for argument, default in zip(defined.kwonlyargs, defined.kw_defaults, strict=True):
        expected = declared[argument.arg].default
        assert expected == (declared[argument.arg].empty if default is None else ast.literal_eval(default))


def test_ops_are_declared():
    """But ops that append to a cache, which are Python's."""
    ops = {op.name for op in OPS} - {"rope_append", "quantized_rope_append"}
    assert set(DECLARED) == ops


def test_it_goes_with_what_it_holds():
    class Held:
        def __call__(self):
            return 1

    held = Held()
    made = _ext.FunctionWrapper("an_op", held)
    made.attempt = held
    made.itself = made
    gone = weakref.ref(held)
    del held, made
    gc.collect()
    assert gone() is None


def test_nothing_is_left_of_a_weak_reference():
    made = function_wrapper()
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None


def test_a_deleted_attempt_is_none():
    made = function_wrapper(lambda: 1)
    del made.attempt
    assert made() == ("original", (), {})


def test_its_name_is_text():
    with pytest.raises(TypeError, match="must be str"):
        _ext.FunctionWrapper(1, original)
