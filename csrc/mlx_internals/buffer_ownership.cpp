#include "mlx_internals/buffer_ownership.h"

#include <type_traits>
#include <utility>

#include "mlx/primitives.h"
#include "mlx_internals/known.h"
#include "mlx_internals/releases.h"

namespace mittens {

namespace {

using Memory = std::shared_ptr<mx::array::Data>;

#if MITTENS_KNOWN_MLX
// MLX neither counts an array's owners nor changes its memory for others: a pointer to that private member, which C++
// lets explicit instantiations name.
struct OfDescriptor {
  friend constexpr auto member(OfDescriptor);
};
template <typename Of, auto pointer>
struct Member {
  friend constexpr auto member(Of) {
    return pointer;
  }
};
template struct Member<OfDescriptor, &mx::array::array_desc_>;

const auto& descriptor(const mx::array& array) {
  return array.*member(OfDescriptor());
}

using Descriptor = std::remove_reference_t<decltype(*descriptor(std::declval<mx::array>()))>;
#endif

// Of a type that this file alone knows: std::get_deleter then tells it from others by an address, not by its name.
struct Owner : BufferOwner {};

const Memory& memory_of(const mx::array& array) {
  const BufferOwner* owner = owner_of(array);
  return owner ? owner->memory : array.data_shared_ptr();
}

// Stands in MLX's graph for an array that has been evaluated before its turn: an array that is made anew of it, as
// mx.compile does, has the same memory.
class Done : public mx::Primitive {
 public:
  Done(mx::Stream stream, mx::array buffer) : mx::Primitive(stream), buffer_(std::move(buffer)) {}

  const char* name() const override {
    return "MittensDone";
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    take(outputs[0]);
  }
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    take(outputs[0]);
  }

 private:
  void take(mx::array& output) const {
    if (output.data_shared_ptr() == nullptr) {
      output.copy_shared_buffer(buffer_);
    }
  }

  mx::array buffer_;
};

}  // namespace

const BufferOwner* owner_of(const mx::array& array) {
  return std::get_deleter<Owner>(array.data_shared_ptr());
}

bool same_memory(const mx::array& a, const mx::array& b) {
  return a.data_shared_ptr().get() == b.data_shared_ptr().get();
}

#if MITTENS_KNOWN_MLX

void count_apart(mx::array& array, std::vector<mx::array> carried) {
  const Memory memory = memory_of(array);
  const std::shared_ptr<void> owner(static_cast<void*>(nullptr), Owner{{memory, std::move(carried)}});
  descriptor(array)->data = Memory(owner, memory.get());
}

mx::array uncounted(const mx::array& array) {
  mx::array view(array.shape(), array.dtype(), nullptr, {});
  view.copy_shared_buffer(array);
  descriptor(view)->data = Memory(memory_of(array));
  return view;
}

WeakArray::WeakArray(const mx::array& array) : descriptor_(descriptor(array)) {}

bool WeakArray::is(const mx::array& array) const {
  return descriptor_.lock() == descriptor(array);
}

std::optional<mx::array> WeakArray::lock() const {
  const auto locked = std::static_pointer_cast<Descriptor>(descriptor_.lock());
  if (!locked) {
    return std::nullopt;
  }
  mx::array array({}, mx::bool_, nullptr, {});
  array.*member(OfDescriptor()) = locked;
  return array;
}

void Promised::fulfil(const mx::array& buffer, const mx::array& with, mx::Stream stream) const {
  const auto promised = std::static_pointer_cast<Descriptor>(descriptor_.lock());
  if (!promised || promised->status != mx::array::Status::unscheduled) {
    return;
  }
  mx::array given = uncounted(buffer);
  count_apart(given);
  const auto& from = descriptor(given);
  promised->strides = from->strides;
  promised->flags = from->flags;
  promised->data_size = from->data_size;
  promised->offset = from->offset;
  promised->data = from->data;
  promised->event = descriptor(with)->event;
  promised->status = mx::array::Status::evaluated;
  promised->inputs.clear();
  // Its owner and this one: MLX, which also holds the arrays that it evaluates, is not evaluating it now.
  if (promised.use_count() == 2) {
    promised->primitive = nullptr;
  } else {
    promised->primitive = std::make_shared<Done>(stream, std::move(given));
  }
}

bool is_held_alone(const mx::array& array) {
  return has_holders(array, 1);
}

bool has_holders(const mx::array& array, long most) {
  return mlx_internals::is_known() && descriptor(array).use_count() <= most;
}

bool is_donatable(const mx::array& input, size_t outputs) {
  if (!mlx_internals::is_known()) {
    return outputs == 1 && input.is_donatable();
  }
  const Memory& data = input.data_shared_ptr();
#if MITTENS_MLX_KNOWS_OWNED_MEMORY
  const bool is_owned = data && data->is_owned();
#else
  const bool is_owned = data != nullptr;
#endif
  return is_owned && descriptor(input).use_count() == static_cast<long>(outputs) && data.use_count() == 1;
}

#else  // of these the last two and WeakArray are called where the parts are not known

void count_apart(mx::array&, std::vector<mx::array>) {}

mx::array uncounted(const mx::array& array) {
  return array;
}

WeakArray::WeakArray(const mx::array&) {}

bool WeakArray::is(const mx::array&) const {
  return false;
}

std::optional<mx::array> WeakArray::lock() const {
  return std::nullopt;
}

void Promised::fulfil(const mx::array&, const mx::array&, mx::Stream) const {}

bool is_held_alone(const mx::array&) {
  return false;
}

bool has_holders(const mx::array&, long) {
  return false;
}

bool is_donatable(const mx::array& input, size_t outputs) {
  return outputs == 1 && input.is_donatable();
}

#endif

}  // namespace mittens
