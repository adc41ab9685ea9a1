"""The text that Metal's compiler is given for one kernel: that kernel alone, and otherwise the whole file's text."""

import re

import pytest

from mlx_mittens import frontend
from mlx_mittens.frontend import build
from mlx_mittens.frontend.read import instantiations, sources
from mlx_mittens.frontend.rewrite import to_run

FILES = frontend.files()
LINE_MARKER = re.compile(r'#(?:line)? ?(\d+) "([^"\n]*)"')


def placed(text):
    """Each line that is not blank, with the file and the number that the text's line markers give it."""
    file, number = "", 0
    for line in text.split("\n"):
        if marker := LINE_MARKER.match(line):
            file, number = marker[2], int(marker[1])
            continue
        if line.strip():
            yield file, number, line
        number += 1


def assert_only(file, variant):
    """clang finds that one kernel in the text, at its place; all the rest is as in the whole file.

    What clang compiles for a variant is made of the translation and the variant alone, so it is the same too.
    """
    text, kernel = frontend.metal_text(file, variant.name)
    whole, one = frontend.translate(file), build._translate(file, text, (), False, to_run(), tensors=False)
    assert kernel == variant.name
    assert one.variants == [variant]
    assert one.kernels == whole.kernels
    assert list(placed(one.text)) == list(placed(whole.text))


@pytest.mark.parametrize("file", FILES)
def test_the_kernels_of_a_file_are_those_that_clang_finds(file):
    assert frontend.metal_kernels(file) == [variant.name for variant in frontend.variants(file)]


@pytest.mark.parametrize("file", FILES)
def test_a_text_has_the_kernel_that_is_asked_for(file):
    variants = frontend.variants(file)
    for variant in (variants[0], variants[-1]):
        assert_only(file, variant)


@pytest.mark.nightly
@pytest.mark.parametrize("file", FILES)
def test_every_kernel_has_a_text(file):
    for variant in frontend.variants(file):
        assert_only(file, variant)


@pytest.mark.parametrize(
    ("file", "kernel"),
    [("norm/softmax.metal", "softmax_block1_bfloat16"), ("matmul/gguf_quantize.metal", "block_quantize_q4_0_float32")],
)
def test_its_ptx_is_that_of_the_whole_file(file, kernel, monkeypatch):
    name = f"tests/{kernel}.metal"
    frontend.register_source(name, frontend.metal_text(file, kernel)[0])
    monkeypatch.setattr(sources, "is_registered", lambda file: False)  # else it is lowered as users' kernels are
    assert frontend.ptx(name, kernel) == frontend.ptx(file, kernel)


HEAD = """#include "mittens/instantiate.h"
template <typename T> kernel void scale(device T* x [[buffer(0)]]) {}
template <typename T> kernel void shift(device T* x [[buffer(0)]]) {}
"""


def kernels_of(tail):
    """The kernels that are found in a text, with which clang agrees."""
    frontend.register_source("tests/planted.metal", HEAD + tail)
    found = instantiations.kernels(frontend.flatten("tests/planted.metal"))
    assert not found or found == [variant.name for variant in frontend.variants("tests/planted.metal")]
    return found


TYPES = ["float32", "float16", "bfloat16"]

# Instantiations, and the kernels of each.
READABLE = {
    'instantiate_kernel("one", scale, float)': ["one"],
    'instantiate_kernel("o" "n" "e", scale, metal::vec<float, 4>);': ["one"],
    'instantiate_types("s", scale)\ninstantiate_types("t", shift)': [f"{name}_{t}" for name in "st" for t in TYPES],
    '#define both(T) \\\n  instantiate_kernel("s_" #T, scale, T) \\\n  instantiate_kernel("t_" #T, shift, T)\n'
    "both(half)\nboth( unsigned   int )": ["s_half", "t_half", "s_unsigned int", "t_unsigned int"],
    '#define a(kind, ...) instantiate_kernel(#kind "_x", s##kind, ##__VA_ARGS__)\na(cale, half)\na(hift, float)': [
        "cale_x",
        "hift_x",
    ],
    '#define a(T) instantiate_kernel("first_" #T, scale, T)\n#undef a\n'
    '#define a(T) instantiate_kernel("then_" #T, scale, T)\na(half)': ["then_half"],
    '// instantiate_kernel("no", scale, int)\n/* instantiate_kernel("no", scale, int)\n*/\n'
    'instantiate_kernel("yes", scale, int)  // instantiate_kernel("no", scale, int)': ["yes"],
    '#define unused(T) instantiate_kernel("unused", scale, T)\n': [],
}


@pytest.mark.parametrize("tail", READABLE)
def test_macros_are_read_as_the_preprocessor_does(tail):
    assert kernels_of(tail) == READABLE[tail]


# Macros that do more than instantiate kernels, or are no calls.
UNREADABLE = [
    '#define a(T) struct Of##T {}; instantiate_kernel("one_" #T, scale, T)\na(half)',
    '#define a(T) instantiate_kernel("one_" #T, scale, T) struct Of##T {};\na(half)',
    '#define a(T, U) instantiate_kernel("one_" #T, scale, U)\na(half)\ninstantiate_kernel("two", scale, float)',
    '#define NAME "one"\ninstantiate_kernel(NAME, scale, float)',
]


@pytest.mark.parametrize("tail", UNREADABLE)
def test_what_cannot_be_read_is_given_whole(tail, monkeypatch):
    assert kernels_of(tail) == []
    monkeypatch.setattr(sources, "is_registered", lambda file: False)
    assert frontend.metal_text("tests/planted.metal", "one") == (frontend.flatten("tests/planted.metal"), "")


def test_of_two_that_a_condition_chooses_between_both_stay():
    tail = '#ifdef A\ninstantiate_kernel("one", scale, float)\n#else\ninstantiate_kernel("one", shift, half)\n#endif\n'
    frontend.register_source("tests/planted.metal", f'{HEAD}{tail}instantiate_kernel("two", scale, half)\n')
    text = instantiations.only(frontend.flatten("tests/planted.metal"), "one")
    assert 'instantiate_kernel("one", scale, float)' in text and '"two"' not in text
    [variant] = build._translate("tests/planted.metal", text, (), False, to_run(), tensors=False).variants
    assert variant.expression == "shift<half>"


def test_a_registered_source_is_given_whole():
    frontend.register_source("tests/planted.metal", f'{HEAD}instantiate_types("s", scale)\n')
    whole = frontend.flatten("tests/planted.metal")
    assert frontend.metal_text("tests/planted.metal", "s_float16") == (whole, "")
    assert frontend.metal_kernels("tests/planted.metal") == []


def test_a_kernel_that_is_not_there_is_left_to_metal():
    file = "norm/softmax.metal"
    assert frontend.metal_text(file, "softmax_simd7_float16") == (frontend.flatten(file), "")
