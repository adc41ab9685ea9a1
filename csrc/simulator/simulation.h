// One launch in the simulator: its fibers, where they meet, and the memory that they see.
#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <optional>
#include <random>

#include "simulator/arena.h"
#include "simulator/fiber.h"
#include "simulator/simulator.h"
#include "simulator/memory_watcher.h"

namespace mittens::simulator {

// A place of a kernel's code: an operation between threads, and the calls that led to it.
struct Point {
  static constexpr unsigned kMost = 16;

  const void* callers[kMost];  // return addresses, the innermost first
  unsigned depth = 0;
  abi::Rounds rounds{};

  bool operator==(const Point& other) const {
    return depth == other.depth && std::equal(callers, callers + depth, other.callers);
  }
  bool is_in_round_of(const Point& other) const {
    const auto is_same = [](const abi::Rounds::Loop& a, const abi::Rounds::Loop& b) {
      return a.key == b.key && a.round == b.round;
    };
    return rounds.depth == other.rounds.depth &&
           std::equal(rounds.loops, rounds.loops + std::min(rounds.depth, abi::Rounds::most), other.rounds.loops,
                      is_same);
  }
  // Whether it comes first: lanes that part meet again behind where they parted, at the latest where a loop's round
  // ends.
  bool operator<(const Point& other) const {
    for (unsigned i = 0; i < abi::Rounds::most; ++i) {
      const abi::Rounds::Loop& loop = rounds.loops[i];
      const abi::Rounds::Loop& others = other.rounds.loops[i];
      const bool is_within = i < rounds.depth;
      const bool other_is_within = i < other.rounds.depth;
      if (loop.key != others.key || (!is_within && !other_is_within)) {
        break;
      }
      if (is_within != other_is_within) {
        return is_within;
      }
      if (loop.round != others.round) {
        return loop.round < others.round;
      }
    }
    return std::lexicographical_compare(std::make_reverse_iterator(callers + depth),
                                        std::make_reverse_iterator(callers),
                                        std::make_reverse_iterator(other.callers + other.depth),
                                        std::make_reverse_iterator(other.callers), std::less<const void*>());
  }
};

struct Fiber {
  enum State { ready, waiting, finished };

  Context context;
  const void* const* base;  // above the frames of the kernel
  abi::Thread thread;
  State state;
  // Of the operation that it waits in, or was in last.
  abi::Scope scope;
  abi::Operation operation;
  Point point;
  abi::Combine combine;
  bool needs_all;  // whether no lane may miss it, as a barrier or a product of matrices
  const abi::Lanes* lanes;  // values of the exchange
};

// Where the threads of one quad, simdgroup or threadgroup wait for each other.
struct Rendezvous {
  abi::Lanes lanes[2];  // of this operation, and of the last one, which not every lane may have read yet
  unsigned parity;
  abi::Scope scope;
  unsigned first;  // thread
  unsigned count;
  unsigned arrived;
  unsigned leader;  // the thread that arrived first
  bool parted;  // whether threads wait in several operations
};

class Simulation final : public Watched {
 public:
  Simulation(Arena& arena, Stacks& stacks, Library& library, const Dispatch& dispatch, const Options& options);

  Counts run();

  // Entries for a running kernel; each may switch to other threads.
  const abi::Lanes& exchange(abi::Scope scope, const abi::Operation& operation, const void* value, unsigned bytes,
                             abi::Combine combine);
  void barrier(abi::Scope scope, const abi::Operation& operation, unsigned memory);
  void* threadgroup_array(const void* key, const char* name, unsigned long bytes, abi::Site site);
  void run_thread();
  // Called at planned branches, from within a fiber.
  void pause(const void* caller);

  // Ends the launch with a Fault, from within a fiber, whose stack is not unwound.
  [[noreturn]] void fail(const std::string& what) override;
  void fault(const std::string& what, const abi::Site& site, const void* caller);  // of the thread that runs

  const std::string& kernel_name() const override {
    return dispatch_.kernel;
  }
  std::string running_name() const override {
    return name_of(*running_);
  }

  MemoryWatcher watcher;

 private:
  struct ThreadgroupArray {
    const void* key;
    size_t region;
    uint64_t threadgroup;  // the last that used it
  };

  void bind_buffers();
  void run_threadgroup(const uint32_t (&position)[3]);
  void start_threads(const uint32_t (&position)[3]);
  void release(const Rendezvous& rendezvous, unsigned active = ~0u);
  void resume_next();
  Fiber* next_ready();
  void arrive(Rendezvous& rendezvous, const abi::Operation& operation, abi::Combine combine,
              std::optional<unsigned> barrier_memory = {});
  Point point_of(const abi::Operation& operation) const;
  bool is_same(const Fiber& fiber, const Fiber& other) const;
  unsigned lanes_with(const Rendezvous& rendezvous, const Fiber& fiber) const;
  void exchange_active(Rendezvous& rendezvous, unsigned active);
  bool release_active_lanes();
  Rendezvous& rendezvous_of(abi::Scope scope, const abi::Thread& thread);
  bool release_barrier_without_finished();
  std::string explain_deadlock();
  void plan_pause();
  std::string explain_endless() const;
  std::string name_of(const Fiber& fiber) const;

  Arena& arena_;
  Stacks& stacks_;
  const abi::Kernel& kernel_;
  const Dispatch& dispatch_;
  const Options options_;
  std::mt19937_64 generator_;
  Counts counts_;

  std::vector<void*> buffers_;
  std::vector<void*> threadgroup_buffers_;
  std::vector<size_t> dynamic_regions_;
  std::vector<ThreadgroupArray> arrays_;
  size_t threadgroup_bytes_ = 0;
  uint64_t threadgroup_serial_ = 0;

  std::vector<Fiber> fibers_;
  std::vector<Rendezvous> quads_;
  std::vector<Rendezvous> simdgroups_;
  Rendezvous threadgroup_;
  std::vector<unsigned> order_;  // in which the threads of a scope are made ready
  std::vector<unsigned> ready_;  // a ring
  size_t ready_head_ = 0;
  size_t ready_count_ = 0;
  size_t finished_ = 0;
  Fiber* running_ = nullptr;
  Context main_context_;
  Context abandoned_;
  bool polling_ = false;  // whether the running fiber waits for a poll
  long long poll_steps_;  // from planned_at_ to the next poll
  long long planned_at_ = 0;  // the steps that were left
  std::vector<const void*> overtime_;  // where threads were after the last step
  std::string endless_;  // the name of the thread that took it
  std::optional<std::string> fault_;
};

}  // namespace mittens::simulator
