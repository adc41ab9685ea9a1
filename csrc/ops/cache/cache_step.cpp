#include "ops/cache/cache_step.h"

#include <stdexcept>
#include <utility>

#include "backends/memory.h"
#include "mlx_internals/buffer_ownership.h"
#include "runtime/array_layout.h"

namespace mittens {

namespace {

// Reads the cache inside eval, so pending work never sees a later step's writes. One output only: MLX keeps sibling
// outputs alive until the work completes.
class CacheStepPrimitive : public mx::Primitive, public Plannable {
 public:
  CacheStepPrimitive(const Append& append, std::optional<Attending> attending)
      : mx::Primitive(append.primitive->stream()),
        append_(append.primitive),
        queries_(append.queries),
        buffer_count_(append.buffers),
        attending_(std::move(attending)) {}

  // The arrays of the buffers are evaluated with the result, as other outputs are: who holds them may be another
  // thread, where the stream is not.
  void promise(const CacheStep& step) {
    result_ = Promised(step.result);
    for (const mx::array& buffer : step.buffers) {
      buffers_.emplace_back(buffer);
    }
  }

  const char* name() const override {
    return "MittensCacheStep";
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    eval(inputs, outputs, &mx::Primitive::eval_gpu);
  }
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    eval(inputs, outputs, &mx::Primitive::eval_cpu);
  }

  void plan(const Arrays& inputs, const Arrays& outputs, CallPlan& plan) override {
    Arrays all = {stand_in(queries_, outputs[0].dtype())};
    all.insert(all.end(), inputs.begin() + 1, inputs.begin() + 1 + static_cast<std::ptrdiff_t>(buffer_count_));
    append_->plan(inputs, all, plan);
    if (auto* attention = attending_ ? dynamic_cast<Plannable*>(attending_->primitive.get()) : nullptr) {
      for (size_t i = 1; i <= buffer_count_; ++i) {
        mx::Shape seen = all[i].shape();
        seen[tokens_axis] = attending_->end;
        all[i] = stand_in(std::move(seen), all[i].dtype());
      }
      attention->plan(all, {stand_in(attending_->shape, outputs[0].dtype())}, plan);
    }
  }

 private:
  using Eval = void (mx::Primitive::*)(const Arrays&, Arrays&);

  void eval(const Arrays& inputs, Arrays& outputs, Eval eval) {
    Arrays all;
    all.reserve(1 + buffer_count_);
    attending_ ? all.push_back(unmade(queries_, outputs[0])) : all.push_back(outputs[0]);
    for (size_t i = 1; i <= buffer_count_; ++i) {
      all.push_back(unmade(inputs[i].shape(), inputs[i]));
    }
    ((*append_).*eval)(inputs, all);
    Arrays kept;
    kept.reserve(2 + buffer_count_);
    for (size_t i = 1; i <= buffer_count_; ++i) {
      if (!same_memory(all[i], inputs[i])) {
        kept.push_back(all[i]);
      }
    }
    if (attending_) {
      kept.push_back(all[0]);
      Arrays seen = {all[0]};
      for (size_t i = 1; i <= buffer_count_; ++i) {
        seen.push_back(seen_of(all[i]));
      }
      Arrays attended = {unmade(attending_->shape, outputs[0])};
      ((*attending_->primitive).*eval)(seen, attended);
      outputs[0].copy_shared_buffer(attended[0], outputs[0].strides(), attended[0].flags(), attended[0].data_size());
    }
    // Once the buffers are handed over nothing of MLX's needs the result: who asked for the buffers alone may drop it
    // before it is written.
    count_apart(outputs[0]);
    kept.push_back(uncounted(outputs[0]));
    keep_until_done(std::move(kept), stream());
    hand_over({all.begin() + 1, all.end()}, outputs[0]);
  }

  static mx::array unmade(mx::Shape shape, const mx::array& like) {
    return {std::move(shape), like.dtype(), nullptr, {}};
  }

  mx::array seen_of(const mx::array& buffer) const {
    mx::Shape shape = buffer.shape();
    shape[tokens_axis] = attending_->end;
    mx::array seen = unmade(std::move(shape), buffer);
    auto flags = buffer.flags();
    flags.row_contiguous = flags.contiguous = attending_->end == buffer.shape(tokens_axis);
    flags.col_contiguous = false;
    seen.copy_shared_buffer(buffer, buffer.strides(), flags, buffer.data_size());
    count_apart(seen);
    return seen;
  }

  void hand_over(Arrays made, mx::array& result) {
    if (result_->is(result)) {
      for (size_t i = 0; i < made.size(); ++i) {
        buffers_[i].fulfil(made[i], result, stream());
      }
    } else {  // mx.compile has made the arrays anew
      count_apart(result, std::move(made));
    }
  }

  std::shared_ptr<KernelPrimitive> append_;
  mx::Shape queries_;
  size_t buffer_count_;
  std::optional<Attending> attending_;
  std::optional<Promised> result_;
  std::vector<Promised> buffers_;
};

// A buffer of a step, until the step fulfils its promise.
class CacheBuffer : public mx::Primitive {
 public:
  CacheBuffer(mx::Stream stream, size_t which) : mx::Primitive(stream), which_(which) {}

  const char* name() const override {
    return "MittensCacheBuffer";
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    take(inputs[0], outputs[0]);
  }
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    take(inputs[0], outputs[0]);
  }

 private:
  void take(const mx::array& result, mx::array& output) const {
    const BufferOwner* owner = owner_of(result);
    if (!owner) {
      throw std::logic_error("[mlx_mittens] a cache's buffer has lost the step that it is of");
    }
    output.copy_shared_buffer(owner->carried[which_]);
  }

  size_t which_;
};

// Memory without a launch.
class CacheRoom : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  const char* name() const override {
    return "MittensCacheRoom";
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    allocate_output(outputs[0], stream());
  }
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    allocate_output(outputs[0], stream());
  }
};

}  // namespace

mx::array unwritten_buffer(mx::Shape shape, mx::Dtype dtype, mx::Stream stream) {
  return mx::array(std::move(shape), dtype, std::make_shared<CacheRoom>(stream), {});
}

CacheStep cache_step(Append append, std::optional<Attending> attending, std::optional<mx::array> result) {
  const mx::Stream stream = append.primitive->stream();
  const mx::Dtype dtype = append.inputs[0].dtype();
  const auto first = append.inputs.begin() + 1;
  const Arrays buffers(first, first + static_cast<std::ptrdiff_t>(append.buffers));
  mx::Shape shape = append.queries;
  if (attending) {
    shape = {shape[0], 1, attending->shape[1] * attending->shape[3]};
  }
  auto primitive = std::make_shared<CacheStepPrimitive>(append, std::move(attending));
  if (result) {
    result->primitive_ptr() = primitive;
    result->inputs() = std::move(append.inputs);
  } else {
    result.emplace(std::move(shape), dtype, primitive, std::move(append.inputs));
  }
  CacheStep step{*result, {}};
  step.buffers.reserve(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    step.buffers.emplace_back(buffers[i].shape(), buffers[i].dtype(), std::make_shared<CacheBuffer>(stream, i),
                              Arrays{*result});
  }
  primitive->promise(step);
  return step;
}

}  // namespace mittens
