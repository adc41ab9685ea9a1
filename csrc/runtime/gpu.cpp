#include "runtime/gpu.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "backends/cuda.h"
#include "backends/launch.h"
#include "backends/metal.h"
#include "backends/name.h"
#include "mlx/device.h"
#include "python/registry.h"

namespace nb = nanobind;

namespace mittens {

namespace {

constexpr const char* module_of_gpus = "mlx_mittens.gpus";
constexpr uint32_t simdgroup = 32;

// Half registers of a lane, and the threads that a core of the M1 and M2 families holds then.
constexpr std::array<std::pair<uint32_t, uint32_t>, 10> threads_by_half_registers = {{
    {104, 1024},
    {112, 896},
    {128, 832},
    {136, 768},
    {144, 704},
    {160, 640},
    {184, 576},
    {208, 512},
    {232, 448},
    {256, 384},
}};
// Where registers are a cache, a core is counted on for twice as many. Up to three times may be there, but plans
// for that many split work more than was predicted to pay.
constexpr uint32_t of_cached_registers = 2;

Gpu gpu_from(nb::handle spec) {
  auto field = [&](const char* name) { return spec.attr(name); };
  Gpu gpu;
  gpu.name = nb::cast<std::string>(field("name"));
  gpu.vendor = nb::cast<std::string>(field("vendor")) == "nvidia" ? Gpu::Vendor::nvidia : Gpu::Vendor::apple;
  gpu.generation = nb::cast<int>(field("generation"));
  gpu.tier = nb::cast<std::string>(field("tier"));
  gpu.cores = nb::cast<uint32_t>(field("cores"));
  gpu.clock_ghz = nb::cast<double>(field("clock_GHz"));
  gpu.bandwidth_gbps = nb::cast<double>(field("bandwidth_GBps"));
  gpu.last_level_cache = static_cast<uint64_t>(nb::cast<double>(field("last_level_cache_MB")) * (1 << 20));
  gpu.has_matrix_units = nb::cast<bool>(field("matrix_units"));
  gpu.float32_matrices = gpu.vendor == Gpu::Vendor::apple;
  gpu.caches_registers = nb::cast<bool>(field("caches_registers"));
  return gpu;
}

// Python's lock orders these: a thread that waits for it holds no other.
const Gpu& gpu_of_python(const char* function, Name name) {
  static auto* known = new std::unordered_map<Name, const Gpu*>();
  nb::gil_scoped_acquire gil;
  if (const auto found = known->find(name); found != known->end()) {
    return *found->second;
  }
  const auto* gpu = new Gpu(gpu_from(nb::module_::import_(module_of_gpus).attr(function)(name.text())));
  return *known->emplace(name, gpu).first->second;
}

const Gpu& simulated_gpu() {
  static thread_local Name name_of_last;
  static thread_local const Gpu* last = nullptr;
  const Name name = simulator_gpu();
  if (!last || name != name_of_last) {
    last = &gpu_of_python("named", name);
    name_of_last = name;
  }
  return *last;
}

const Gpu& mac_gpu() {
  static std::atomic<const Gpu*> gpu = nullptr;
  if (!gpu) {
    Gpu found = gpu_of_python("of_this_mac", Name("this Mac"));
    found.has_matrix_units = metal::has_matrix_units();  // macOS has to reach them
    const Gpu* none = nullptr;
    gpu.compare_exchange_strong(none, new Gpu(found));
  }
  return *gpu;
}

const Gpu& nvidia_gpu(int index) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<int, const Gpu*>();
  std::lock_guard lock(mutex);
  const Gpu*& gpu = (*known)[index];
  if (!gpu) {
    const cuda::Device device = cuda::device(index);
    gpu = new Gpu{
        .name = device.name,
        .vendor = Gpu::Vendor::nvidia,
        .generation = device.compute_capability,
        .tier = "",
        .cores = static_cast<uint32_t>(device.multiprocessors),
        .clock_ghz = device.clock_khz * 1e-6,
        .bandwidth_gbps = device.memory_clock_khz * 1e-6 * 2 * device.memory_bus_bits / 8,
        .last_level_cache = static_cast<uint64_t>(device.second_cache_bytes),
        .has_matrix_units = false,
        .float32_matrices = false,
        .caches_registers = false,
    };
  }
  return *gpu;
}

void bind(nb::module_& module) {
  nb::list threads;
  for (const auto& [half_registers, count] : threads_by_half_registers) {
    threads.append(nb::make_tuple(half_registers, count));
  }
  module.attr("threads_by_half_registers") = nb::tuple(threads);
  module.def(
      "gpu",
      [] {
        const Gpu& gpu = gpu_of(mx::default_stream(mx::default_device()));
        nb::dict result;
        result["name"] = gpu.name.text();
        result["vendor"] = gpu.vendor == Gpu::Vendor::apple ? "apple" : "nvidia";
        result["generation"] = gpu.generation;
        result["tier"] = gpu.tier.text();
        result["cores"] = gpu.cores;
        result["clock_GHz"] = gpu.clock_ghz;
        result["bandwidth_GBps"] = gpu.bandwidth_gbps;
        result["last_level_cache"] = gpu.last_level_cache;
        result["matrix_units"] = gpu.has_matrix_units;
        result["float32_matrix_units"] = mlx_uses_matrix_units(gpu, mx::float32);
        return result;
      },
      "What the plans know of the default device: its GPU, or on the CPU the one that the simulator stands for.");
}

const Register registered(bind);

}  // namespace

uint32_t Gpu::resident_simdgroups(Registers registers) const {
  if (vendor == Vendor::nvidia) {
    // Four schedulers of a multiprocessor have 16,384 registers each, and give them out eight a lane at a time.
    constexpr uint32_t schedulers = 4, scheduler_registers = 16384, most = 16;
    const uint32_t of_a_lane = (registers.nvidia + 7) / 8 * 8;
    return schedulers * std::clamp(scheduler_registers / (simdgroup * of_a_lane), 1u, most);
  }
  const auto fits = std::find_if(threads_by_half_registers.begin(), threads_by_half_registers.end() - 1,
                                 [&](const auto& row) { return registers.apple <= row.first; });
  return fits->second / simdgroup * (caches_registers ? of_cached_registers : 1);
}

Gpu Gpu::with_parallelism(int power) const {
  Gpu gpu = *this;
  if (power != 0) {
    power = std::clamp(power, -8, 8);
    gpu.cores = std::max(static_cast<uint32_t>(std::lround(std::ldexp(cores, power))), 1u);
  }
  return gpu;
}

const Gpu& gpu_of(mx::Stream stream) {
  if (stream.device != mx::Device::gpu) {
    return simulated_gpu();
  }
  return cuda::available() ? nvidia_gpu(stream.device.index) : mac_gpu();
}

bool runs_kernels(mx::Stream stream) {
  return stream.device == mx::Device::gpu || simulator_enabled();
}

bool runs_apple_kernels(mx::Stream stream) {
  return runs_kernels(stream) && gpu_of(stream).vendor == Gpu::Vendor::apple;
}

bool mlx_uses_matrix_units(const Gpu& gpu, mx::Dtype dtype) {
  static const bool has_tf32 = [] {  // which the units take float32 as
    const char* value = std::getenv("MLX_ENABLE_TF32");
    return !value || std::atoi(value) != 0;
  }();
  return gpu.has_matrix_units && (dtype != mx::float32 || has_tf32);
}

}  // namespace mittens
