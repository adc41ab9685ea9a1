#include "ops/cache/rope_append_checks.h"

#include <cmath>

#include "runtime/checks.h"

namespace mittens {

void check_rotary(const char* op, const Rotary& rotary, const mx::array& heads) {
  if (rotary.dims <= 0 || rotary.dims % 2 != 0 || rotary.dims > heads.shape(-1)) {
    checks::fail(op, "dims is ", rotary.dims, ": expected a positive even number, at most the width of ",
                 heads.shape(-1));
  }
  if (rotary.base.has_value() == rotary.freqs.has_value()) {
    checks::fail(op, rotary.base ? "both base and freqs are given" : "neither base nor freqs is given",
                 ": expected one of them");
  }
  if (rotary.base && !(std::isfinite(*rotary.base) && *rotary.base > 0)) {
    checks::fail(op, "base is ", *rotary.base, ": expected a finite positive number");
  }
  if (!std::isfinite(rotary.scale)) {
    checks::fail(op, "scale is ", rotary.scale, ": expected a finite number");
  }
  if (rotary.freqs && mx::issubdtype(rotary.freqs->dtype(), mx::complexfloating)) {
    checks::fail<DtypeError>(op, "freqs has dtype ", rotary.freqs->dtype(), ": expected float32");
  }
  if (rotary.freqs && (rotary.freqs->ndim() != 1 || rotary.freqs->shape(0) != rotary.dims / 2)) {
    checks::fail(op, "freqs has shape ", rotary.freqs->shape(), ": expected one dimension with ", rotary.dims / 2,
                 " elements");
  }
  if (rotary.query_norm.has_value() != rotary.key_norm.has_value()) {
    const char* names[] = {"query_norm", "key_norm"};
    const bool first = rotary.query_norm.has_value();
    checks::fail(op, names[!first], " is given without ", names[first], ": expected both or none");
  }
  if (rotary.query_norm) {
    checks::per_column(op, "query_norm", *rotary.query_norm, heads);
    checks::per_column(op, "key_norm", *rotary.key_norm, heads);
    checks::epsilon(op, rotary.eps);
  }
}

void check_offset(const char* op, const Offset& offset, const mx::array& batched) {
  const auto* offsets = std::get_if<mx::array>(&offset);
  if (!offsets) {
    return;
  }
  if (!mx::issubdtype(offsets->dtype(), mx::integer)) {
    checks::fail<DtypeError>(op, "offset has dtype ", offsets->dtype(), ": expected an integer");
  }
  const bool is_one = offsets->ndim() <= 1 && offsets->size() == 1;
  if (!is_one && offsets->shape() != mx::Shape{batched.shape(0)}) {
    checks::fail(op, "offset has shape ", offsets->shape(), ": expected one number, or (", batched.shape(0),
                 "), one for each row of the batch");
  }
}

void check_room(const char* op, const char* name, const mx::array& buffer, const mx::array& heads, int start) {
  const int tokens = heads.shape(tokens_axis);
  if (start < 0 || tokens > buffer.shape(tokens_axis) - start) {
    checks::fail(op, name, " has room for ", buffer.shape(tokens_axis), " tokens: expected ", tokens, " of them from ",
                 start, " on to fit");
  }
}

}  // namespace mittens
