"""Reductions of cooperative tensors, iterators, and results that become operands, in the simulator."""

import numpy as np
import pytest
from helpers.simulate import register, run
from helpers.tensor_ops import HEADERS, TYPES, drawn, near, product
from helpers.tolerances import FLOAT16, SUM

from mlx_mittens.simulator import Fault

# Sums, maxima and minima of a product's rows and columns, by their places.
REDUCED = """
[[kernel]] void test(device half* a [[buffer(0)]], device half* b [[buffer(1)]], device float* values [[buffer(2)]]) {{
  tensor A(a, dextents<int, 2>(32, {m}));
  tensor B(b, dextents<int, 2>(32, {n}));
  constexpr auto desc = matmul2d_descriptor({m}, {n}, 32, false, true);
  matmul2d<desc, execution_simdgroup> op;
  auto result = op.get_destination_cooperative_tensor<decltype(A), decltype(B), float>();
  auto reduced = op.get_{kind}_reduction_destination_cooperative_tensor<decltype(A), decltype(B), float>();
  op.run(A, B, result);
  reduce_{kind}s(result, reduced, reduction_operation::{operation}, {identity});
  for (ushort i = 0; i < reduced.get_capacity(); ++i) {{
    if (reduced.is_valid_element(i)) values[reduced.get_multidimensional_index(i)[0]] = reduced[i];
  }}
  reduced.store(tensor(values + 64, extents<int, {count}>()));
}}
""".replace("reduce_{kind}s", "reduce_{plural}")
PLURALS = {"row": "rows", "column": "columns"}
# The value to begin with, the sign of products that it must not change, and the result of a row of products.
OPERATIONS = {
    "sum": ("0.0f", -1, lambda products, axis: products.sum(axis)),
    "max": ("reduction_operation_identity<float>::max_identity", -1, lambda products, axis: products.max(axis)),
    "min": ("INFINITY", 1, lambda products, axis: products.min(axis)),
    "max with a greater one": ("2.0f", -1, lambda products, axis: np.full(products.shape[1 - axis], 2.0)),
}


@pytest.mark.parametrize("shuffled", [False, True], ids=["m5", "shuffled"])
@pytest.mark.parametrize("kind", ["row", "column"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("m", "n"), [(16, 32), (8, 16), (48, 24)])
def test_reductions(m, n, operation, kind, shuffled, rng):
    identity, sign, reduced = OPERATIONS[operation]
    a, b = np.abs(drawn(rng, (m, 32), "half")), sign * np.abs(drawn(rng, (n, 32), "half"))
    values = np.zeros(128, np.float32)
    count = m if kind == "row" else n
    names = {"kind": kind, "plural": PLURALS[kind], "operation": operation[:3], "identity": identity, "count": count}
    file = register(HEADERS + REDUCED.format(m=m, n=n, **names))
    counts = run(file, "test", [a, b, values], shuffled_tensors=shuffled, complete=False)
    expected = reduced(product(a, b, False, True), 1 if kind == "row" else 0)
    near(values[:count], expected, SUM)
    near(values[64 : 64 + count], expected, SUM)
    assert np.isnan(values[count:64]).all() and np.isnan(values[64 + count :]).all()  # nothing wrote them
    assert counts["simd_operations"] == 1 and counts["tensor_operations"] > 0


# Each of two SIMD-groups has rows of its own. Halves and integers are reduced in their own type.
TYPED = """
[[kernel]] void test(device {left}* a [[buffer(0)]], device {left}* b [[buffer(1)]], device {result}* out [[buffer(2)]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]]) {{
  tensor A(a + simdgroup * 16 * 32, dextents<int, 2>(32, 16));
  tensor B(b, dextents<int, 2>(32, 24));
  constexpr auto desc = matmul2d_descriptor(16, 24, 32, false, true);
  matmul2d<desc, execution_simdgroup> op;
  auto result = op.get_destination_cooperative_tensor<decltype(A), decltype(B), {result}>();
  auto columns = op.get_column_reduction_destination_cooperative_tensor<decltype(A), decltype(B), {result}>();
  op.run(A, B, result);
  reduce_columns(result, columns, reduction_operation::max, reduction_operation_identity<{result}>::max_identity);
  auto again = columns;
  if (is_iterator_compatible(result, columns) && is_iterator_compatible(again, columns)) {{
    for (auto it = result.begin(); it != result.end(); ++it) {{
      if (it.is_valid_element()) *it -= *columns.map_iterator(again.map_iterator(it));
    }}
  }}
  result.store(tensor(out + simdgroup * 16 * 24, extents<int, 24, 16>()));
}}
"""


@pytest.mark.parametrize(("left", "result"), [("half", "half"), ("half", "float"), ("int8_t", "int")])
def test_values_of_columns_in_two_simdgroups(left, result, rng):
    a, b = drawn(rng, (32, 32), left), drawn(rng, (24, 32), left)
    out = np.zeros((2, 16, 24), TYPES[result])
    file = register(HEADERS + TYPED.format(left=left, result=result))
    run(file, "test", [("input", a), ("input", b), ("output", out)], threads=64)
    products = product(a, b, False, True).reshape(2, 16, 24)
    near(out, products - products.max(axis=1, keepdims=True), {"half": 2 * FLOAT16, "float": SUM, "int": 0}[result])


def test_a_maximum_without_an_identity_begins_at_zero():
    a, b, values = np.ones((16, 32), np.float16), -np.ones((32, 32), np.float16), np.ones(128, np.float32)
    text = REDUCED.replace(", {identity})", ")").format(
        m=16, n=32, kind="row", plural="rows", operation="max", identity="", count=16
    )
    run(register(HEADERS + text), "test", [a, b, values], complete=False)
    assert (values[:16] == 0).all()  # as Metal's header has it


# Attention of 16 queries in one SIMD-group: the softmax runs in registers, and its result is the left operand of the
# second product. Where the layouts differ values pass through threadgroup memory.
ATTENTION = """
[[kernel]] void test(device half* q [[buffer(0)]], device half* k [[buffer(1)]], device half* v [[buffer(2)]],
                     device float* out [[buffer(3)]], constant int& keys [[buffer(4)]]) {
  tensor Q(q, dextents<int, 2>(64, 16));
  tensor K(k, dextents<int, 2>(64, keys));
  tensor V(v, dextents<int, 2>(64, keys));
  tensor O(out, dextents<int, 2>(64, 16));
  threadgroup float memory[16 * 32];
  tensor P(memory, extents<int, 32, 16>());
  constexpr auto first = matmul2d_descriptor(16, 32, 64, false, true);
  constexpr auto second = matmul2d_descriptor(16, 64, 32, false, false, false,
                                              matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<first, execution_simdgroup> qk;
  matmul2d<second, execution_simdgroup> pv;
  auto scores = qk.get_destination_cooperative_tensor<decltype(Q), decltype(K), float>();
  auto most = qk.get_row_reduction_destination_cooperative_tensor<decltype(Q), decltype(K), float>();
  auto before = most, sums = most, total = most;
  auto weights = pv.get_left_input_cooperative_tensor<float, half, float>();
  auto result = pv.get_destination_cooperative_tensor<decltype(weights), decltype(V), float>();
  const bool is_mapped = is_iterator_compatible(scores, most) && is_iterator_compatible(result, most);
  threadgroup float of_row[16];
  for (ushort i = 0; i < total.get_capacity(); ++i) {
    before[i] = -INFINITY;
    total[i] = 0;
  }
  for (auto it = result.begin(); it != result.end(); ++it) {
    *it = 0;
  }
  for (int at = 0; at < keys; at += 32) {
    auto block = K.slice(0, at);
    qk.run(Q, block, scores);
    for (auto it = scores.begin(); it != scores.end(); it++) {
      if (it.is_valid_element() && at + it.get_multidimensional_index()[0] >= keys) *it = -INFINITY;
    }
    reduce_rows(scores, most, reduction_operation::max, -INFINITY);
    for (ushort i = 0; i < most.get_capacity(); ++i) {
      most[i] = max(most[i], before[i]);
      before[i] = exp(before[i] - most[i]);
      total[i] *= before[i];
    }
    if (is_mapped) {
      for (ushort i = 0; i < scores.get_capacity(); ++i) {
        scores[i] = exp(scores[i] - most[most.map_iterator(scores.begin() + i) - most.begin()]);
      }
      for (auto it = result.begin(); it != result.end(); ++it) *it *= *before.map_iterator(it);
    } else {
      simdgroup_barrier(mem_flags::mem_threadgroup);
      most.store(tensor(of_row, extents<int, 16>()));
      simdgroup_barrier(mem_flags::mem_threadgroup);
      for (ushort i = 0; i < scores.get_capacity(); ++i) {
        scores.set(i, exp(scores.get(i) - of_row[scores.get_multidimensional_index(i)[1]]));
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      before.store(tensor(of_row, extents<int, 16>()));
      simdgroup_barrier(mem_flags::mem_threadgroup);
      for (ushort i = 0; i < result.get_capacity(); ++i) {
        result[i] *= of_row[result.get_multidimensional_index(i)[1]];
      }
    }
    reduce_rows(scores, sums);
    for (ushort i = 0; i < total.get_capacity(); ++i) {
      total[i] += sums[i];
      before[i] = most[i];
    }
    auto values = V.slice(0, at);
    if (pv.is_compatible_as_left_input<float, half, float>(scores)) {
      auto left = pv.get_left_input_cooperative_tensor<float, half, float>(scores);
      pv.run(left, values, result);
    } else {
      simdgroup_barrier(mem_flags::mem_threadgroup);
      scores.store(P);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      weights.load(P);
      pv.run(weights, values, result);
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  total.store(tensor(of_row, extents<int, 16>()));
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (ushort i = 0; i < result.get_capacity(); ++i) {
    result[i] /= of_row[result.get_multidimensional_index(i)[1]];
  }
  result.store(O);
}
"""


def attention(rng, text, keys, **options):
    q, k, v = (drawn(rng, shape, "half") for shape in ((16, 64), (keys, 64), (keys, 64)))
    out = np.zeros((16, 64), np.float32)
    data = [("input", q), ("input", k), ("input", v), ("output", out), np.array([keys], np.int32).tobytes()]
    run(register(HEADERS + text), "test", data, **options)
    scores = product(q, k, False, True)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    near(out, weights / weights.sum(axis=1, keepdims=True) @ v.astype(np.float64), SUM)


@pytest.mark.parametrize("shuffled", [False, True], ids=["m5", "shuffled"])
@pytest.mark.parametrize("keys", [32, 75])
def test_attention_that_asks(keys, shuffled, rng):
    attention(rng, ATTENTION, keys, shuffled_tensors=shuffled)


def test_attention_that_does_not_ask(rng):
    asks = "is_iterator_compatible(scores, most) && is_iterator_compatible(result, most)"
    text = ATTENTION.replace(asks, "true")
    attention(rng, text, 75)
    with pytest.raises(Fault, match=r"test\d+\.metal:\d+.*map_iterator finds no element in this lane"):
        attention(rng, text, 75, shuffled_tensors=True)
