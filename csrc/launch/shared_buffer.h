// Buffers that are updated in place although work that reads them is still on its way.
//
// MLX updates a buffer in place only if nothing else holds it, and work on its way does: a loop that runs a step ahead
// of its device, as generation does, copies the key-value caches of the layers that the device has not come to yet.
// Here arrays over one buffer are counted apart: what holds the array that stands for the buffer says that somebody may
// still want what is in it; views for kernels of ours, which run in the order of their stream, hold nothing but the
// memory.
#pragma once

#include <memory>
#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"

namespace mittens {

namespace mx = mlx::core;

// What owns the memory of such an array.
struct BufferOwner {
  std::shared_ptr<mx::allocator::Data> memory;
  mx::Stream stream;               // on which it was written, and views of it are read
  std::vector<mx::array> buffers;  // others that came about with it

  void operator()(const void*) const {}
};

// None for an array of MLX's own.
const BufferOwner* owner_of(const mx::array& array);

// Has an array counted apart from others of the same memory.
void count_apart(mx::array& array, mx::Stream stream, std::vector<mx::array> buffers = {});

// An evaluated array's memory, which nothing that counts it sees.
mx::array uncounted(const mx::array& array);

// An array that a primitive evaluates besides its outputs, for as long as there is one.
class Promised {
 public:
  explicit Promised(const mx::array& array);

  // Gives it a buffer, counted apart, unless it has been evaluated; it is there when `with` is.
  void fulfil(const mx::array& buffer, const mx::array& with, mx::Stream stream) const;

 private:
  std::weak_ptr<void> descriptor_;  // of MLX's own type
};

bool same_memory(const mx::array& a, const mx::array& b);

// Whether nobody but a primitive of so many outputs on a stream may want what an input holds. MLX's is_donatable() says
// it of one output: each of several holds the inputs.
bool is_donatable(const mx::array& input, size_t outputs, mx::Stream stream);

}  // namespace mittens
