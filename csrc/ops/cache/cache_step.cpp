#include "ops/cache/cache_step.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "backends/memory.h"
#include "mlx/primitives.h"
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
        input_count_(append.inputs.size()),
        buffer_count_(append.buffers),
        attending_(std::move(attending)) {}

  // The same append, with an attention.
  CacheStepPrimitive(const CacheStepPrimitive& other, Attending attending)
      : mx::Primitive(other.append_->stream()),
        append_(other.append_),
        queries_(other.queries_),
        input_count_(other.input_count_),
        buffer_count_(other.buffer_count_),
        attending_(std::move(attending)) {}

  size_t buffers() const {
    return buffer_count_;
  }
  bool attends() const {
    return attending_.has_value();
  }

  // The arrays of the buffers are evaluated with the result, as other outputs are: a thread that does not have the
  // stream may hold them.
  void promise(const mx::array& result, const Arrays& buffers) {
    result_ = Promised(result);
    for (const mx::array& buffer : buffers) {
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
    append_->plan({inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(input_count_)}, all, plan);
    if (auto* attention = attending_ ? dynamic_cast<Plannable*>(attending_->primitive.get()) : nullptr) {
      for (size_t i = 1; i <= buffer_count_; ++i) {
        mx::Shape seen = all[i].shape();
        seen[tokens_axis] = attending_->end - attending_->first;
        all[i] = stand_in(std::move(seen), all[i].dtype());
      }
      all.insert(all.end(), inputs.begin() + static_cast<std::ptrdiff_t>(input_count_), inputs.end());
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
    Arrays others = taken(outputs[0].inputs());
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
      seen.insert(seen.end(), others.begin(), others.end());
      kept.insert(kept.end(), others.begin(), others.end());
      Arrays attended = {unmade(attending_->shape, outputs[0])};
      ((*attending_->primitive).*eval)(seen, attended);
      outputs[0].copy_shared_buffer(attended[0], outputs[0].strides(), attended[0].flags(), attended[0].data_size());
    }
    // Once the buffers are handed over nothing of MLX's needs the result: who asked for the buffers alone may drop it
    // before it is written.
    count_apart(outputs[0]);
    kept.push_back(uncounted(outputs[0]));
    keep_until_done(std::move(kept), stream());
    Arrays made(all.begin() + 1, all.end());
    if (buffers_.size() > buffer_count_) {
      made.push_back(all[0]);
    }
    hand_over(std::move(made), outputs[0]);
  }

  // Moves the inputs that only the attention reads out of the step's inputs. The append's inputs remain. We must not
  // copy them, since a second reference would prevent their update in place.
  Arrays taken(Arrays& inputs) const {
    const auto first = inputs.begin() + static_cast<std::ptrdiff_t>(std::min(input_count_, inputs.size()));
    Arrays others(std::make_move_iterator(first), std::make_move_iterator(inputs.end()));
    inputs.erase(first, inputs.end());
    return others;
  }

  static mx::array unmade(mx::Shape shape, const mx::array& like) {
    return {std::move(shape), like.dtype(), nullptr, {}};
  }

  mx::array seen_of(const mx::array& buffer) const {
    mx::Shape shape = buffer.shape();
    shape[tokens_axis] = attending_->end - attending_->first;
    const bool is_whole = shape == buffer.shape();
    mx::array seen = unmade(std::move(shape), buffer);
    auto flags = buffer.flags();
    flags.row_contiguous = flags.contiguous = is_whole;
    flags.col_contiguous = false;
    const int64_t offset = attending_->first * buffer.strides(tokens_axis);
    seen.copy_shared_buffer(buffer, buffer.strides(), flags, buffer.data_size() - offset, offset);
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
  size_t input_count_;  // of the append, before other inputs of the attention
  size_t buffer_count_;
  std::optional<Attending> attending_;
  std::optional<Promised> result_;
  std::vector<Promised> buffers_;  // and the queries, if an attention joined the step
};

// A buffer of a step, until the step fulfils its promise.
class CacheBuffer : public mx::Primitive {
 public:
  CacheBuffer(mx::Stream stream, size_t which) : mx::Primitive(stream), which_(which) {}

  size_t which() const {
    return which_;
  }

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

// Tokens of an array: all of it, or a view of the whole of its other axes.
struct Tokens {
  mx::array of;
  int first;
  int end;

  static Tokens in(const mx::array& view) {
    if (!is_primitive(view, "Slice") || view.ndim() != 4) {
      return {view, 0, view.ndim() == 4 ? view.shape(tokens_axis) : 0};
    }
    const mx::array& whole = view.inputs()[0];
    const auto [start, stop, strides] = static_cast<const mx::Slice&>(view.primitive()).state();
    mx::Shape first(4, 0), end = whole.shape();
    first[tokens_axis] = start[tokens_axis];
    end[tokens_axis] = first[tokens_axis] + view.shape(tokens_axis);
    if (start != first || view.shape() != mx::Shape{end[0], end[1], view.shape(tokens_axis), end[3]} ||
        strides != mx::Shape(4, 1)) {
      return {view, 0, view.shape(tokens_axis)};
    }
    return {whole, first[tokens_axis], end[tokens_axis]};
  }
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

bool is_of_few_but(const mx::array& array, const mx::array& result) {
  constexpr size_t most = 64;
  std::vector<const mx::array*> seen = {&array};
  const auto is_seen = [&](const mx::array& input) {
    return std::any_of(seen.begin(), seen.end(), [&](const mx::array* one) { return one->id() == input.id(); });
  };
  for (size_t i = 0; i < seen.size(); ++i) {
    if (seen[i]->id() == result.id() || seen.size() > most) {
      return false;
    }
    if (is_pending(*seen[i])) {
      for (const mx::array& input : seen[i]->inputs()) {
        if (is_pending(input) && !is_seen(input)) {
          seen.push_back(&input);
        }
      }
    }
  }
  return true;
}

std::optional<mx::array> join_step(const Arrays& inputs, const std::shared_ptr<mx::Primitive>& attention,
                                   const mx::Shape& shape) {
  mx::array queries = inputs[0];
  if (!is_pending(queries) || queries.is_tracer() || queries.ndim() != 4 || queries.shape(tokens_axis) != 1 ||
      queries.primitive().stream() != attention->stream()) {
    return std::nullopt;
  }
  const auto* step = dynamic_cast<const CacheStepPrimitive*>(&queries.primitive());
  if (!step || step->attends() || inputs.size() < 1 + step->buffers()) {
    return std::nullopt;
  }
  Arrays buffers;
  std::optional<Tokens> seen;
  for (size_t i = 0; i < step->buffers(); ++i) {
    const Tokens tokens = Tokens::in(inputs[1 + i]);
    const bool is_buffer = is_pending(tokens.of) && !tokens.of.is_tracer() && tokens.of.inputs().size() == 1 &&
                           tokens.of.inputs()[0].id() == queries.id();
    const auto* buffer = is_buffer ? dynamic_cast<const CacheBuffer*>(&tokens.of.primitive()) : nullptr;
    if (!buffer || buffer->which() != i || (seen && (seen->first != tokens.first || seen->end != tokens.end))) {
      return std::nullopt;
    }
    seen = tokens;
    buffers.push_back(tokens.of);
  }
  const auto others = inputs.begin() + 1 + static_cast<std::ptrdiff_t>(step->buffers());
  if (!std::all_of(others, inputs.end(), [&](const mx::array& other) { return is_of_few_but(other, queries); })) {
    return std::nullopt;
  }
  const mx::Stream stream = attention->stream();
  auto joined = std::make_shared<CacheStepPrimitive>(*step, Attending{attention, shape, seen->end, seen->first});
  Arrays of_joined = queries.inputs();
  of_joined.insert(of_joined.end(), others, inputs.end());
  mx::array result(shape, queries.dtype(), joined, std::move(of_joined));
  // An array that still holds the queries gets them as one more output of the joined step, as the buffers do.
  queries.primitive_ptr() = std::make_shared<CacheBuffer>(stream, buffers.size());
  queries.inputs() = {result};
  for (mx::array& buffer : buffers) {
    buffer.inputs() = {result};
  }
  buffers.push_back(queries);
  joined->promise(result, buffers);
  return result;
}

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
  primitive->promise(step.result, step.buffers);
  return step;
}

}  // namespace mittens
