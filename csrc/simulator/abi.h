// The interface of the simulator and a kernel library compiled for it. Compiled on both sides, so it includes
// nothing. The library calls the simulator through one table of functions; it is linked against nothing else.
#pragma once

namespace mittens::abi {

constexpr unsigned version = 12;

constexpr unsigned simd_width = 32;
constexpr unsigned quad_width = 4;
constexpr unsigned fence = 64;  // bytes around a watched array of a thread's own, which nothing may access

// Where in the .metal file a barrier, a simd operation or a threadgroup array stands.
struct Site {
  const char* file;
  unsigned line;
};

// The loops around a place, in whose rounds lanes may part, the outermost first. Beyond `depth` stands the loop that a
// thread has left, or is between two rounds of.
struct Rounds {
  static constexpr unsigned most = 8;  // deeper ones are not told apart
  struct Loop {
    unsigned key;  // of the loop in the code, and of the call that led to it; 0 for none
    unsigned round;
  };
  Loop loops[most];
  unsigned depth;
};

// The thread that runs now, as Metal's attributes name it.
struct Thread {
  unsigned position_in_threadgroup[3];
  unsigned position_in_grid[3];
  unsigned threadgroup[3];
  unsigned threads_per_threadgroup[3];  // fewer at the edge of a grid that threadgroups do not divide
  unsigned dispatch_threads_per_threadgroup[3];
  unsigned threadgroups[3];
  unsigned threads_per_grid[3];
  unsigned index;  // in its threadgroup
  unsigned lane;  // in its simdgroup
  unsigned simdgroup;
  unsigned simdgroups;
  unsigned quadgroups;
  Rounds rounds;
};

// Values that the lanes of a simdgroup (or of a quad) exchange in one operation. Lanes that are not active hold 0xff.
struct Lanes {
  struct alignas(16) Value {
    unsigned char bytes[16];
  };
  Value value[simd_width];
  Value result;  // of `combine` on the values of the active lanes, once for all of them
  unsigned active;  // a bit for each lane that is at the operation
};
using Combine = void (*)(Lanes& lanes);

enum Scope : unsigned { quad_scope, simdgroup_scope, threadgroup_scope };
enum Memory : unsigned { no_memory = 0, device_memory = 1, threadgroup_memory = 2 };

// The type of both operands of a product of simdgroup matrices; float where they differ. Or a product or a reduction of
// cooperative tensors.
enum Fragments : unsigned char {
  no_fragments,
  float_fragments,
  half_fragments,
  bfloat_fragments,
  tensor_fragments,
  reduction_fragments,
};

// The value that a lane brings to a product of cooperative tensors.
struct TensorMeeting {
  void* product;
  unsigned multiplies;  // and adds, of the SIMD-group
  bool is_of_bytes;
};

// Which lane of a cooperative tensor holds which elements. It differs between GPUs, so that a kernel has to ask.
enum TensorLayout : unsigned { layout_of_m5, shuffled_layout };

struct Operation {
  const char* name;  // "simd_sum": lanes that meet must be at the same operation
  Site site;
  const void* caller;  // the return address: tells apart operations of one line
  const void* const* frame;  // of the function that was called: the callers of the caller, by their frame pointers
  Fragments fragments;  // of a product of matrices, which is counted by itself; of another operation none
};

struct Runtime {
  Thread* thread;
  long long steps;  // branches left before the launch counts as endless
  long long pause;  // the number of steps at which `paused` is called
  TensorLayout tensor_layout;

  const Lanes& (*exchange)(Scope scope, const Operation& operation, const void* value, unsigned bytes, Combine combine);
  void (*barrier)(Scope scope, const Operation& operation, unsigned memory);
  void* (*threadgroup_array)(const void* key, const char* name, unsigned long bytes, Site site);
  void (*atomic)(const volatile void* address, unsigned long bytes, bool reads, bool writes, const void* caller);
  void (*load)(const void* address, unsigned long bytes, const void* caller);
  void (*store)(const void* address, unsigned long bytes, const void* caller);
  // Of a vector the components of a mask, each of `bytes`: one access.
  void (*lanes)(const void* address, unsigned long bytes, unsigned mask, bool stores, const void* caller);
  void (*outside_array)(const void* caller);  // an index beyond an array of a thread's own
  // An array of a thread's own begins to live, or without a name ends; an element has `unit` bytes. Returns the
  // address.
  void* (*private_array)(void* address, unsigned long bytes, unsigned long unit, const char* name);
  void (*paused)(const void* caller);
  void (*fault)(const char* what, Site site, const void* caller);  // ends the launch; without a site the caller's line
};

struct Argument {
  const char* name;
  unsigned index;  // the buffer index, or the threadgroup index
  bool threadgroup;
};

struct Kernel {
  const char* name;
  void (*entry)(void* const* buffers, void* const* threadgroup_buffers);
  const Argument* arguments;
  unsigned argument_count;
  unsigned max_threads;  // of a threadgroup
};

struct Library {
  unsigned version;
  bool watched;  // compiled with a callback before every access
  const Kernel* kernels;
  unsigned kernel_count;
};

// Every library exports this one function as mittens_library; it takes the table of functions and hands over its own.
using Open = const Library* (*)(Runtime* runtime);

}  // namespace mittens::abi
