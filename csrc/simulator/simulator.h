// Running a Metal kernel, compiled for the CPU, over a whole grid: every Metal thread is a fiber, and every error in it
// a Fault. Plain C++: neither MLX nor Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "simulator/abi.h"

namespace mittens::simulator {

struct Buffer {
  enum Role { input, output, constant, inout };

  std::string name;  // for messages; the kernel's own name for the argument where this is empty
  void* data;
  size_t bytes;
  Role role;
  size_t offset = 0;  // from the start of the GPU's buffer, which says how `data` would be aligned there
  size_t room = std::numeric_limits<size_t>::max();  // bytes that the memory has from `data` on, where that is known
  size_t item = 0;  // bytes of an element, where that is known
};

struct Dispatch {
  std::string kernel;
  std::vector<Buffer> buffers;  // by buffer index
  uint32_t threadgroups[3];
  uint32_t threads[3];  // of one threadgroup
  uint32_t threadgroup_bytes = 0;
  uint32_t grid[3] = {0, 0, 0};  // in threads, where the last threadgroups are to be cut short; else 0
};

struct Options {
  uint64_t seed = 0;  // shuffles threads and threadgroups; 0 leaves them in order
  uint64_t step_limit = 1'000'000'000;  // branches that one threadgroup may take
  bool watch = true;  // needs a library that was compiled to be watched
  // Whether an operation of a simdgroup or a quad works on its active lanes, as in Metal, where the others have
  // returned or wait for a larger scope. Without it an inactive lane is a fault: our kernels run on NVIDIA GPUs too.
  bool active_lanes = false;
  bool early_exits = false;  // whether threads that have returned count as arrived at threadgroup barriers
  bool count = false;  // whether accesses are gathered by simdgroup, for device_accesses to bank_conflicts of Counts
  bool profile = false;  // whether the launch is profiled, for the members of Counts from `profiled` on
  bool complete = true;  // whether the watcher demands that every byte of an output is written
  bool flush_subnormals = false;  // whether subnormal float32 are zero, of operands and of results
  bool shuffled_tensors = false;  // whether cooperative tensors have another layout than an M5's
  bool fuse = false;  // whether `a * b + c` within an expression rounds once; of a library that was compiled so
};

// An error of a kernel that a GPU would not forgive. The message names kernel, thread, threadgroup, and line.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Counts of one kind of work at one line of the source.
struct LineCounts {
  std::string file;
  unsigned line = 0;
  std::string operation;  // load, store, atomic, barrier, simd or matrix
  std::string memory;  // device or threadgroup, of an access
  uint64_t executions = 0;  // of the instruction that they executed most often
  uint64_t operations = 0;  // accesses, merged; or operations between threads
};

constexpr unsigned kLineBytes = 128;  // of device memory

struct Counts {
  uint64_t threads = 0;
  uint64_t threadgroup_barriers = 0;  // each counted once for the threads that meet there
  uint64_t simdgroup_barriers = 0;
  uint64_t simd_operations = 0;
  uint64_t matrix_operations = 0;
  uint64_t half_matrix_operations = 0;  // matrix_operations whose operands are both half
  uint64_t bfloat_matrix_operations = 0;  // and of bfloat; the rest is computed in float
  uint64_t tensor_operations = 0;  // products of cooperative tensors, of a simdgroup
  uint64_t tensor_multiplies = 0;  // multiplies and adds of tensor_operations
  uint64_t byte_tensor_multiplies = 0;  // the part of tensor_multiplies with 8-bit operands
  uint64_t threadgroup_bytes = 0;  // the most that one threadgroup had
  uint64_t device_bytes_loaded = 0;
  uint64_t params_bytes_loaded = 0;  // of device_bytes_loaded: GPUs keep them at hand
  uint64_t device_bytes_stored = 0;
  uint64_t threadgroup_bytes_loaded = 0;
  uint64_t threadgroup_bytes_stored = 0;
  uint64_t device_accesses = 0;  // of simdgroups
  uint64_t device_lines = 0;  // of kLineBytes that they touched, each counted once an access
  uint64_t device_lines_fewest = 0;  // the least that could hold the bytes touched
  uint64_t threadgroup_accesses = 0;
  uint64_t bank_conflicts = 0;  // rounds beyond the fewest that 32 banks of 4 bytes need
  bool profiled = false;
  uint64_t distinct_lines = 0;  // of kLineBytes of device memory, params left out, that the launch touches
  uint64_t distinct_lines_loaded = 0;
  uint64_t distinct_lines_stored = 0;
  uint64_t threadgroup_lines = 0;  // the sum over threadgroups of the distinct lines that each touches
  uint64_t device_loads = 0;  // accesses of simdgroups, merged as in simulator/profile.h, params left out
  uint64_t device_stores = 0;
  uint64_t threadgroup_loads = 0;
  uint64_t threadgroup_stores = 0;
  std::vector<LineCounts> lines;
};

// A shared object that the front end made of one .metal file.
class Library {
 public:
  // Loaded once, for as long as the process lives.
  static std::shared_ptr<Library> at(const std::string& path);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const abi::Kernel* find(const std::string& name) const;  // nullptr if there is none
  std::vector<std::string> kernels() const;
  bool watched() const {
    return table_->watched;
  }
  const std::string& path() const {
    return path_;
  }
  bool contains(uintptr_t address) const {
    return address >= image_begin_ && address < image_end_;
  }
  bool has_extent() const {
    return image_end_ != 0;
  }
  uintptr_t base() const {
    return base_;
  }

 private:
  Library() = default;
  static std::shared_ptr<Library> open(const std::string& path);

  std::string path_;
  void* handle_ = nullptr;
  const abi::Library* table_ = nullptr;
  uintptr_t base_ = 0;
  uintptr_t image_begin_ = 0;
  uintptr_t image_end_ = 0;
};

// Runs the dispatch; the outputs are written only if there was no fault. One at a time: a second caller waits.
Counts run(Library& library, const Dispatch& dispatch, const Options& options = {});

// How far this process' latest launch is; for other threads to read while it runs.
struct Progress {
  uint64_t launch = 0;  // its number, from 1 on
  uint64_t done = 0;  // threadgroups
  uint64_t threadgroups = 0;
  uint64_t polls = 0;  // of all launches
};

Progress progress();

// A function that launches call every 2^17 branches, on the stack of the thread that runs them: it may throw, which
// ends the launch.
void set_poll(void (*poll)());

}  // namespace mittens::simulator
