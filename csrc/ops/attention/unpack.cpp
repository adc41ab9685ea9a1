#include "ops/attention/unpack.h"

#include <bit>
#include <memory>
#include <optional>
#include <utility>

#include "mlx/ops.h"
#include "ops/attention/attention.h"
#include "params/attention.h"
#include "runtime/array_layout.h"

namespace mittens {

namespace {

const Name file = "attention/nvidia/attention_unpack.metal";

// [batch, heads, tokens, width]. Inputs: words, scales and biases, whose rows may lie anywhere.
class AttentionUnpack : public KernelPrimitive {
 public:
  AttentionUnpack(mx::Stream stream, int group_size, int bits)
      : KernelPrimitive(stream), group_size_(group_size), bits_(bits) {}

  const char* name() const override {
    return "MittensAttentionUnpack";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& unpack = static_cast<const AttentionUnpack&>(other);
    return group_size_ == unpack.group_size_ && bits_ == unpack.bits_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {unpacked(inputs[0], bits_)};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    constexpr int alignments[] = {16, 1, 1};  // a lane loads its integers at once, its scale and bias alone
    bool as_is = true;
    for (size_t i = 0; i < inputs.size(); ++i) {
      as_is = as_is && has_rows(inputs[i], alignments[i]);
    }
    if (as_is) {
      return inputs;
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      copies.push_back(with_rows(inputs[i], alignments[i], stream()));
    }
    return copies;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& y = outputs[0];
    AttentionUnpackParams params{};
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(y.dtype(), "attention", "unpack_", bits_, "bit");
    TokenRows* const rows[] = {&params.words, &params.scales, &params.biases};
    for (size_t i = 0; i < inputs.size(); ++i) {
      add_view(launch, inputs[i]);
      *rows[i] = token_rows(inputs[i]);
    }
    params.heads = y.shape(1);
    params.tokens = y.shape(2);
    params.width = y.shape(3);
    params.group_shift = std::countr_zero(static_cast<uint32_t>(group_size_));
    const uint32_t runs = params.tokens * (params.width / kUnpacked);
    launch.threadgroups = {ceil_divide(runs, uint32_t(kUnpackThreads)), params.heads, uint32_t(y.shape(0))};
    launch.threads = {kUnpackThreads, 1, 1};
    return in_order(launch.output(y).params(params));
  }

  Arrays composed(const Arrays& inputs) override {
    return {mx::dequantize(inputs[0], inputs[1], inputs[2], group_size_, bits_, "affine", std::nullopt, std::nullopt,
                           stream())};
  }

 private:
  int group_size_;
  int bits_;
};

}  // namespace

mx::array unpacked_rows(const Arrays& packed, int group_size, int bits, mx::Stream stream) {
  auto primitive = std::make_shared<AttentionUnpack>(stream, group_size, bits);
  check_base<AttentionUnpack>();
  mx::Shape shape = primitive->output_shapes(packed)[0];
  return mx::array(std::move(shape), packed[1].dtype(), std::move(primitive), packed);
}

}  // namespace mittens
