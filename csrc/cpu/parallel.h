// A small persistent pool of threads. Any number of threads may call parallel_for at once, from inside its bodies
// too.
#pragma once

#include <cstddef>

namespace mittens::cpu {

// Threads that take part in a parallel_for, the caller included: the cores this process may run on, or the
// environment variable MLX_MITTENS_THREADS.
size_t threads();

using ParallelBody = void (*)(const void* context, size_t begin, size_t end);

void parallel_for(size_t count, size_t grain, ParallelBody body, const void* context);

// Calls body(begin, end) over [0, count) in pieces of at most grain, in any order and at the same time; returns
// when all are done. The body must not throw.
template <typename Body>
void parallel_for(size_t count, size_t grain, const Body& body) {
  parallel_for(
      count, grain,
      [](const void* context, size_t begin, size_t end) { (*static_cast<const Body*>(context))(begin, end); }, &body);
}

// Uninitialised float32 memory of one call, aligned for vectors. Each thread keeps its last buffer: fresh memory
// from the system would cost more than the work on it.
class Scratch {
 public:
  explicit Scratch(size_t size);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  float* data() const;

 private:
  float* data_;
  size_t size_;
};

}  // namespace mittens::cpu
