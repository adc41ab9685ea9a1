// Where threads meet: barriers, exchanges between lanes, and threads that never come.
#include <algorithm>
#include <bit>
#include <cstring>

#include "simulator/simulation.h"
#include "simulator/texts.h"

namespace mittens::simulator {

namespace {

unsigned all_of(const Rendezvous& rendezvous) {
  return ~0u >> (abi::simd_width - rendezvous.count);
}

bool is_of_matrices(const abi::Operation& operation) {
  return operation.fragments != abi::no_fragments && operation.fragments != abi::reduction_fragments;
}

}  // namespace

// Threads (of lanes, the active ones) that wait there; the last to arrive runs on.
void Simulation::release(const Rendezvous& rendezvous, unsigned active) {
  // With a seed, sometimes before those who wait already, so that some threads run far ahead of others.
  const bool in_front = options_.seed && generator_() % 2;
  const auto make_ready = [&](unsigned index) {
    if (fibers_[index].state != Fiber::waiting || fibers_[index].scope != rendezvous.scope) {
      return;
    }
    if (rendezvous.scope != abi::threadgroup_scope && !(active >> (index - rendezvous.first) & 1)) {
      return;
    }
    fibers_[index].state = Fiber::ready;
    if (in_front) {
      ready_head_ = ready_head_ == 0 ? ready_.size() - 1 : ready_head_ - 1;
      ready_[ready_head_] = index;
    } else {
      const size_t at = ready_head_ + ready_count_;
      ready_[at < ready_.size() ? at : at - ready_.size()] = index;
    }
    ++ready_count_;
  };
  if (!options_.seed) {
    for (unsigned index = rendezvous.first; index < rendezvous.first + rendezvous.count; ++index) {
      make_ready(index);
    }
    return;
  }
  const unsigned turn = rendezvous.count > 1 ? static_cast<unsigned>(generator_() % rendezvous.count) : 0;
  const bool whole = rendezvous.count == order_.size();
  for (unsigned i = 0; i < rendezvous.count; ++i) {
    const unsigned at = (i + turn) % rendezvous.count;
    const unsigned index = whole ? order_[at] : rendezvous.first + at;
    make_ready(index);
  }
}

Rendezvous& Simulation::rendezvous_of(abi::Scope scope, const abi::Thread& thread) {
  return scope == abi::threadgroup_scope ? threadgroup_
         : scope == abi::simdgroup_scope ? simdgroups_[thread.simdgroup]
                                         : quads_[thread.index / abi::quad_width];
}

Point Simulation::point_of(const abi::Operation& operation) const {
  Point point;
  point.callers[point.depth++] = operation.caller;
  if (options_.active_lanes) {
    point.rounds = running_->thread.rounds;
    // A frame holds the caller's frame and the return address.
    const void* const* frame = operation.frame;
    while (point.depth < Point::kMost) {
      const auto* next = static_cast<const void* const*>(frame[0]);
      if (next <= frame || next >= running_->base) {
        break;
      }
      frame = next;
      point.callers[point.depth++] = frame[1];
    }
  }
  return point;
}

bool Simulation::is_same(const Fiber& fiber, const Fiber& other) const {
  return fiber.scope == other.scope && fiber.operation.name == other.operation.name && fiber.point == other.point &&
         (fiber.needs_all || fiber.point.is_in_round_of(other.point));
}

// The lanes that wait in the operation of one of them.
unsigned Simulation::lanes_with(const Rendezvous& rendezvous, const Fiber& fiber) const {
  unsigned lanes = 0;
  for (unsigned lane = 0; lane < rendezvous.count; ++lane) {
    const Fiber& other = fibers_[rendezvous.first + lane];
    lanes |= unsigned{other.state == Fiber::waiting && is_same(fiber, other)} << lane;
  }
  return lanes;
}

void Simulation::arrive(Rendezvous& rendezvous, const abi::Operation& operation, abi::Combine combine,
                        std::optional<unsigned> barrier_memory) {
  watcher.settle();
  Fiber& fiber = *running_;
  fiber.scope = rendezvous.scope;
  fiber.operation = operation;
  fiber.point = point_of(operation);
  fiber.needs_all = barrier_memory || operation.fragments;
  fiber.combine = combine;
  if (rendezvous.arrived == 0) {
    rendezvous.leader = fiber.thread.index;
  } else if (const Fiber& leader = fibers_[rendezvous.leader]; !is_same(fiber, leader)) {
    if (!options_.active_lanes || (fiber.needs_all && leader.needs_all)) {
      fail("divergence: " + name_of(fiber) + " is at " + operation.name + ", " + text_of(operation.site) + ", while " +
           name_of(leader) + " waits at " + leader.operation.name + ", " + text_of(leader.operation.site));
    }
    rendezvous.parted = true;
  }
  if (++rendezvous.arrived < rendezvous.count || rendezvous.parted) {
    fiber.state = Fiber::waiting;
    resume_next();
    return;
  }
  if (barrier_memory) {
    ++(rendezvous.scope == abi::threadgroup_scope ? counts_.threadgroup_barriers : counts_.simdgroup_barriers);
    watcher.barrier(rendezvous.scope, fiber.thread.simdgroup, *barrier_memory);
  } else {
    ++(operation.fragments == abi::tensor_fragments ? counts_.tensor_operations
       : is_of_matrices(operation)                  ? counts_.matrix_operations
                                                    : counts_.simd_operations);
    if (operation.fragments == abi::tensor_fragments) {
      abi::TensorMeeting meeting;
      std::memcpy(&meeting, rendezvous.lanes[rendezvous.parity].value[0].bytes, sizeof(meeting));
      counts_.tensor_multiplies += meeting.multiplies;
      counts_.byte_tensor_multiplies += meeting.is_of_bytes ? meeting.multiplies : 0;
    }
    counts_.half_matrix_operations += operation.fragments == abi::half_fragments;
    counts_.bfloat_matrix_operations += operation.fragments == abi::bfloat_fragments;
  }
  if (rendezvous.scope == abi::threadgroup_scope) {
    rendezvous.arrived = 0;
    watcher.meet(rendezvous.scope, fiber.thread.simdgroup);
    release(rendezvous);
  } else {
    exchange_active(rendezvous, all_of(rendezvous));
  }
}

// Ends the operation of some lanes of a simdgroup or a quad; the values of other operations are kept.
void Simulation::exchange_active(Rendezvous& rendezvous, unsigned active) {
  abi::Lanes& lanes = rendezvous.lanes[rendezvous.parity];
  rendezvous.parity ^= 1;
  abi::Lanes& next = rendezvous.lanes[rendezvous.parity];
  rendezvous.arrived = 0;
  rendezvous.parted = false;
  for (unsigned lane = 0; lane < rendezvous.count; ++lane) {
    const unsigned index = rendezvous.first + lane;
    Fiber& fiber = fibers_[index];
    if (active >> lane & 1) {
      fiber.lanes = &lanes;
      continue;
    }
    if (fiber.state == Fiber::waiting && fiber.scope == rendezvous.scope) {
      next.value[lane] = lanes.value[lane];
      if (rendezvous.arrived++ == 0) {
        rendezvous.leader = index;
      }
      rendezvous.parted |= !is_same(fiber, fibers_[rendezvous.leader]);
    }
    std::memset(lanes.value[lane].bytes, 0xff, sizeof(lanes.value[lane].bytes));
  }
  lanes.active = active;
  watcher.meet(rendezvous.scope, fibers_[rendezvous.first].thread.simdgroup);
  if (const abi::Combine combine =
          fibers_[rendezvous.first + static_cast<unsigned>(std::countr_zero(active))].combine) {
    combine(lanes);
  }
  release(rendezvous, active);
}

// Nothing can run any more. Of the lanes of a simdgroup that wait for others of it, those whose operation is the first
// in the code are its active lanes: the others cannot come to it before these go on, because they have returned, wait
// for all of the threadgroup, or wait behind it. Returns whether there are such.
bool Simulation::release_active_lanes() {
  bool released = false;
  for (Rendezvous& simdgroup : simdgroups_) {
    const Fiber* first = nullptr;
    for (unsigned index = simdgroup.first; index < simdgroup.first + simdgroup.count; ++index) {
      const Fiber& fiber = fibers_[index];
      if (fiber.state == Fiber::waiting && fiber.scope != abi::threadgroup_scope && !fiber.needs_all &&
          (!first || fiber.point < first->point)) {
        first = &fiber;
      }
    }
    if (!first) {
      continue;
    }
    const Fiber chosen = *first;
    const auto exchange = [&](Rendezvous& rendezvous) {
      if (const unsigned active = lanes_with(rendezvous, chosen)) {
        ++counts_.simd_operations;
        exchange_active(rendezvous, active);
      }
    };
    if (chosen.scope == abi::simdgroup_scope) {
      exchange(simdgroup);
    } else {
      const unsigned quad = simdgroup.first / abi::quad_width;
      for (unsigned i = 0; i * abi::quad_width < simdgroup.count; ++i) {
        exchange(quads_[quad + i]);
      }
    }
    released = true;
  }
  return released;
}

const abi::Lanes& Simulation::exchange(abi::Scope scope, const abi::Operation& operation, const void* value,
                                       unsigned bytes, abi::Combine combine) {
  const abi::Thread& thread = running_->thread;
  Rendezvous& rendezvous = rendezvous_of(scope, thread);
  abi::Lanes& lanes = rendezvous.lanes[rendezvous.parity];
  std::memcpy(lanes.value[thread.index - rendezvous.first].bytes, value, bytes);
  watcher.operation(is_of_matrices(operation) ? Profile::matrix : Profile::simd, operation, thread);
  arrive(rendezvous, operation, combine);
  return *running_->lanes;
}

void Simulation::barrier(abi::Scope scope, const abi::Operation& operation, unsigned memory) {
  const abi::Thread& thread = running_->thread;
  Rendezvous& rendezvous = rendezvous_of(scope, thread);
  watcher.operation(Profile::barrier, operation, thread);
  arrive(rendezvous, operation, nullptr, memory);
}

bool Simulation::release_barrier_without_finished() {
  if (threadgroup_.arrived == 0 || threadgroup_.arrived + finished_ < fibers_.size()) {
    return false;
  }
  threadgroup_.arrived = 0;
  watcher.meet(abi::threadgroup_scope, 0);
  release(threadgroup_);
  return true;
}

// Nothing can run any more: someone waits for a thread that never comes.
std::string Simulation::explain_deadlock() {
  for (const Fiber& fiber : fibers_) {
    if (fiber.state != Fiber::waiting) {
      continue;
    }
    const Rendezvous& rendezvous = rendezvous_of(fiber.scope, fiber.thread);
    const auto is_there = [&fiber, this](const Fiber& other) {
      return other.state == Fiber::waiting && is_same(fiber, other);
    };
    const auto begin = fibers_.begin() + rendezvous.first;
    const auto missing = rendezvous.count - std::count_if(begin, begin + rendezvous.count, is_there);
    for (unsigned i = rendezvous.first; i < rendezvous.first + rendezvous.count; ++i) {
      const Fiber& other = fibers_[i];
      if (is_there(other)) {
        continue;
      }
      return "[" + dispatch_.kernel + "] divergence: " + fiber.operation.name + ", " + text_of(fiber.operation.site) +
             ", is missed by " + std::to_string(missing) + " of " + plural(rendezvous.count, "thread") + ": " +
             name_of(fiber) + " waits there, but " + name_of(other) +
             (other.state == Fiber::finished
                  ? " has returned"
                  : std::string(" waits at ") + other.operation.name + ", " + text_of(other.operation.site));
    }
  }
  return "[" + dispatch_.kernel + "] deadlock";
}

}  // namespace mittens::simulator
