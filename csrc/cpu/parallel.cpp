#include "cpu/parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

namespace mittens::cpu {

namespace {

// How long a thread spins before it sleeps: about as long as a wake-up takes, since the cores may be shared.
constexpr std::chrono::microseconds spin_time{15};

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename Condition>
bool spin_until(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + spin_time;
  do {
    for (int i = 0; i < 16; ++i) {
      if (condition()) {
        return true;
      }
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

size_t count_threads() {
  if (const char* wanted = std::getenv("MLX_MITTENS_THREADS")) {
    const long n = std::strtol(wanted, nullptr, 10);
    if (n > 0) {
      return static_cast<size_t>(std::min(n, 1024L));
    }
  }
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return static_cast<size_t>(std::max(1, CPU_COUNT(&set)));
  }
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

// One parallel_for. It lives on its caller's stack and is linked in the pool while pieces are left to take.
struct Job {
  ParallelBody body;
  const void* context;
  size_t count;
  size_t grain;
  size_t helpers_wanted;
  std::atomic<size_t> next{0};  // the first index that nobody took
  std::atomic<size_t> helpers{0};  // at work; written under the pool's mutex
  Job* link = nullptr;

  void work() {
    for (size_t begin; (begin = next.fetch_add(grain, std::memory_order_relaxed)) < count;) {
      body(context, begin, std::min(begin + grain, count));
    }
  }
};

class Pool {
 public:
  explicit Pool(size_t workers) {
    try {
      for (size_t i = 0; i < workers; ++i) {
        std::thread([this] { serve(); }).detach();
      }
    } catch (const std::system_error&) {
      // The system grants no more threads: go on with fewer.
    }
  }

  void run(Job& job) {
    size_t sleepers;
    {
      std::lock_guard lock(mutex_);
      job.link = jobs_;
      jobs_ = &job;
      waiting_.store(true, std::memory_order_relaxed);
      sleepers = std::min(sleeping_, job.helpers_wanted);
    }
    for (size_t i = 0; i < sleepers; ++i) {
      news_.notify_one();
    }
    job.work();
    {
      std::lock_guard lock(mutex_);
      unlink(job);
    }
    // Nobody joins any more, and who is in still works on its last piece.
    if (!spin_until([&] { return job.helpers.load(std::memory_order_acquire) == 0; })) {
      std::unique_lock lock(mutex_);
      done_.wait(lock, [&] { return job.helpers.load(std::memory_order_relaxed) == 0; });
    }
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (Job* job = jobs_) {
        job->helpers.fetch_add(1, std::memory_order_relaxed);
        if (--job->helpers_wanted == 0) {
          unlink(*job);
        }
        lock.unlock();
        job->work();
        lock.lock();
        unlink(*job);
        // The job may be gone from here on.
        if (job->helpers.fetch_sub(1, std::memory_order_release) == 1) {
          done_.notify_all();
        }
        continue;
      }
      lock.unlock();
      const bool news = spin_until([&] { return waiting_.load(std::memory_order_relaxed); });
      lock.lock();
      if (!news) {
        ++sleeping_;
        news_.wait(lock, [&] { return jobs_ != nullptr; });
        --sleeping_;
      }
    }
  }

  // Takes a job off the list if it is still there. The mutex is held.
  void unlink(Job& job) {
    for (Job** place = &jobs_; *place; place = &(*place)->link) {
      if (*place == &job) {
        *place = job.link;
        break;
      }
    }
    waiting_.store(jobs_ != nullptr, std::memory_order_relaxed);
  }

  std::mutex mutex_;
  std::condition_variable news_;  // for workers: there is a job
  std::condition_variable done_;  // for callers: a job lost its last helper
  Job* jobs_ = nullptr;  // jobs that want helpers
  std::atomic<bool> waiting_{false};
  size_t sleeping_ = 0;
};

std::atomic<Pool*> pool{nullptr};

// The pool lives until the process ends: its threads may be asleep in it. After fork() a child starts its own.
Pool& the_pool() {
  Pool* current = pool.load(std::memory_order_acquire);
  if (!current) {
    static std::mutex& creation = *new std::mutex;
    static const int registered = pthread_atfork([] { creation.lock(); }, [] { creation.unlock(); },
                                                 [] {
                                                   pool.store(nullptr, std::memory_order_relaxed);
                                                   creation.unlock();
                                                 });
    (void)registered;
    std::lock_guard lock(creation);
    current = pool.load(std::memory_order_relaxed);
    if (!current) {
      current = new Pool(threads() - 1);
      pool.store(current, std::memory_order_release);
    }
  }
  return *current;
}

constexpr std::align_val_t alignment{64};
constexpr size_t most_kept = (8 << 20) / sizeof(float);

struct Memory {
  float* data = nullptr;
  size_t size = 0;
};

struct Spare {
  Memory memories[2];
  ~Spare() {
    for (Memory& memory : memories) {
      ::operator delete(memory.data, alignment);
    }
  }
};

thread_local Spare spare;

}  // namespace

size_t threads() {
  static const size_t count = count_threads();
  return count;
}

void parallel_for(size_t count, size_t grain, ParallelBody body, const void* context) {
  grain = std::max<size_t>(grain, 1);
  const size_t pieces = count / grain + (count % grain != 0);
  const size_t helpers = std::min(threads(), pieces) - (pieces != 0);
  if (helpers == 0) {
    for (size_t begin = 0; begin < count; begin += grain) {
      body(context, begin, std::min(begin + grain, count));
    }
    return;
  }
  Job job{body, context, count, grain, helpers};
  the_pool().run(job);
}

Scratch::Scratch(size_t size) : data_(nullptr), size_(size) {
  if (size == 0) {
    return;
  }
  for (Memory& memory : spare.memories) {
    if (memory.size >= size) {
      data_ = std::exchange(memory.data, nullptr);
      size_ = std::exchange(memory.size, 0);
      return;
    }
  }
  data_ = static_cast<float*>(::operator new(size * sizeof(float), alignment));
}

Scratch::~Scratch() {
  if (!data_) {
    return;
  }
  // In place of the smallest one kept, unless this is smaller yet.
  Memory& smallest = *std::min_element(std::begin(spare.memories), std::end(spare.memories),
                                       [](auto& a, auto& b) { return a.size < b.size; });
  if (size_ <= most_kept && size_ > smallest.size) {
    std::swap(data_, smallest.data);
    smallest.size = size_;
  }
  ::operator delete(data_, alignment);
}

float* Scratch::data() const {
  return data_;
}

}  // namespace mittens::cpu
