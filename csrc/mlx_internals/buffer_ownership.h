// Buffers that are updated in place although kernels that read them are still queued.
//
// MLX updates a buffer in place only if nothing else holds it, and queued work does: a loop that runs a step ahead of
// its device, as generation does, copies the key-value caches of the layers that the device has not come to yet.
// References held by queued work need not block in-place reuse, as long as later work runs after it. So an array's
// owners are counted a second time, in a pointer of its own to the same memory. That is right for an array if all of
// its readers so far are kernels of the primitive that made it, or of earlier ones: its event comes after them, and the
// launches say that they write it, so that MLX's graphs and barriers order them. Later readers hold the array, and
// count.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"

namespace mittens {

namespace mx = mlx::core;

// The owner of the memory of such an array.
struct BufferOwner {
  std::shared_ptr<mx::array::Data> memory;
  std::vector<mx::array> carried;  // other arrays that were made with it

  void operator()(const void*) const {}
};

// None for an array of MLX's own.
const BufferOwner* owner_of(const mx::array& array);

// Has an array's owners counted apart from others of the same memory.
void count_apart(mx::array& array, std::vector<mx::array> carried = {});

// An evaluated array's memory, which nothing that counts it sees.
mx::array uncounted(const mx::array& array);

// An array that is there for as long as others hold it.
class WeakArray {
 public:
  explicit WeakArray(const mx::array& array);

  bool is(const mx::array& array) const;
  std::optional<mx::array> lock() const;

 protected:
  std::weak_ptr<void> descriptor_;  // of MLX's own type
};

// An array that a primitive evaluates although it is none of its outputs: those MLX holds until their work is done.
class Promised : public WeakArray {
 public:
  using WeakArray::WeakArray;

  // Gives it a buffer, counted apart, if there still is such an array; it is there when `with` is, on the stream. Then
  // it is part of MLX's graph no more, or not for longer than it is evaluated once more.
  void fulfil(const mx::array& buffer, const mx::array& with, mx::Stream stream) const;
};

bool same_memory(const mx::array& a, const mx::array& b);

// Whether this is all there is of an array: no other array in MLX's graph has it as its input, nobody holds a copy.
bool is_held_alone(const mx::array& array);

// Whether an array has at most `most` holders: inputs in MLX's graph, siblings, copies.
bool has_holders(const mx::array& array, long most);

// Whether nobody but a primitive may need an input's memory. outputs: of the primitive; each output holds the inputs,
// but MLX's is_donatable() assumes one output.
bool is_donatable(const mx::array& input, size_t outputs);

}  // namespace mittens
