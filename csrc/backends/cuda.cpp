#include "backends/cuda.h"

#include <stdexcept>

#ifdef __linux__
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "backends/compiled.h"
#include "backends/frontend.h"
#include "backends/visitor.h"
#include "mlx_internals/buffer_ownership.h"
#include "mlx_internals/cuda_encoder.h"
#include "mlx_internals/known.h"
#include "mlx_internals/releases.h"

namespace mittens::cuda {

namespace {

// The part of the CUDA driver that is needed, by hand: neither its header nor its library is wanted at build time.
class Driver {
 public:
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  bool loaded() const {
    return library_ != nullptr;
  }

  void* current_context() const {
    void* context = nullptr;
    check(context_get_current(&context), "cuCtxGetCurrent");
    return context;
  }

  Device device(int index) const {
    check(init(0), "cuInit");
    int device = 0;
    check(device_get(&device, index), "cuDeviceGet");
    std::array<char, 256> name{};
    check(device_get_name(name.data(), name.size(), device), "cuDeviceGetName");
    auto attribute = [&](int number) {
      int value = 0;
      check(device_get_attribute(&value, number, device), "cuDeviceGetAttribute");
      return value;
    };
    auto if_known = [&](int number) {
      int value = 0;
      return device_get_attribute(&value, number, device) ? 0 : value;
    };
    // Numbers of CUdevice_attribute.
    return {.name = name.data(),
            .compute_capability = 10 * attribute(75) + attribute(76),
            .multiprocessors = attribute(16),
            .clock_khz = if_known(13),
            .memory_clock_khz = if_known(36),
            .memory_bus_bits = if_known(37),
            .second_cache_bytes = if_known(38)};
  }

  CUfunc_st* load(const std::string& ptx, const std::string& entry) const {
    constexpr int kErrorLogBuffer = 5, kErrorLogBytes = 6;  // CU_JIT_ERROR_LOG_BUFFER and its size
    std::array<char, 4096> log{};
    int options[] = {kErrorLogBuffer, kErrorLogBytes};
    void* values[] = {log.data(), reinterpret_cast<void*>(log.size())};
    void* module = nullptr;
    CUfunc_st* function = nullptr;
    if (int status = module_load_data(&module, ptx.c_str(), 2, options, values)) {
      throw std::runtime_error("the CUDA driver refused the PTX of kernel " + entry + ": " + message(status) + "\n" +
                               log.data());
    }
    check(module_get_function(&function, module, entry.c_str()), entry.c_str());
    return function;
  }

 private:
  Driver() : library_(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
    if (library_) {
      find(init, "cuInit");
      find(device_get, "cuDeviceGet");
      find(device_get_name, "cuDeviceGetName");
      find(device_get_attribute, "cuDeviceGetAttribute");
      find(context_get_current, "cuCtxGetCurrent");
      find(module_load_data, "cuModuleLoadDataEx");
      find(module_get_function, "cuModuleGetFunction");
      find(get_error_string, "cuGetErrorString");
    }
  }

  template <typename Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    if (!function) {
      throw std::runtime_error(std::string("libcuda.so.1 has no ") + name + ": update the NVIDIA driver");
    }
  }

  std::string message(int status) const {
    const char* text = nullptr;
    get_error_string(status, &text);
    return text ? text : "CUDA error " + std::to_string(status);
  }

  void check(int status, const char* what) const {
    if (status) {
      throw std::runtime_error(std::string(what) + ": " + message(status));
    }
  }

  void* library_;
  int (*init)(unsigned) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*device_get_name)(char*, int, int) = nullptr;
  int (*device_get_attribute)(int*, int, int) = nullptr;
  int (*context_get_current)(void**) = nullptr;
  int (*module_load_data)(void**, const void*, unsigned, int*, void**) = nullptr;
  int (*module_get_function)(CUfunc_st**, void*, const char*) = nullptr;
  int (*get_error_string)(int, const char**) = nullptr;
};

// A kernel's entry in its PTX: its host name, as an identifier.
std::string entry_name(std::string kernel) {
  for (char& c : kernel) {
    if (!std::isalnum(static_cast<unsigned char>(c))) {
      c = '_';
    }
  }
  return kernel;
}

// The constants whose bytes take the place of their address among the parameters.
std::map<uint32_t, size_t> sizes_by_value(const Launch& launch) {
  std::map<uint32_t, size_t> sizes;
  for (size_t i = 0; i < launch.arguments.size(); ++i) {
    if (const auto* bytes = std::get_if<Bytes>(&launch.arguments[i]); bytes && bytes->by_pointer) {
      sizes[i] = bytes->data.size();
    }
  }
  return sizes;
}

// Tells loaded kernels apart: the name, and for kernels that are not ours the constants that specialise them.
std::string identity(const Launch& launch, const std::map<uint32_t, size_t>& sizes) {
  std::string key = launch.kernel.text() + " of " + launch.file.text();
  for (const auto& [index, size] : sizes) {
    key += " bytes " + std::to_string(index) + "=" + std::to_string(size);
  }
  for (const auto& [index, value] : launch.function_constants) {
    key += " constant " + std::to_string(index) + "=" + value;
  }
  return key;
}

// Loaded once per context and kept for the life of the process, as MLX keeps its own modules.
CUfunc_st* loaded_function(const Launch& launch, const std::map<uint32_t, size_t>& sizes) {
  using Functions = std::unordered_map<std::string, CUfunc_st*>;
  static std::mutex mutex;
  static std::unordered_map<void*, Functions> loaded;

  void* context = Driver::get().current_context();
  const std::string key = identity(launch, sizes);
  {
    std::lock_guard lock(mutex);
    if (CUfunc_st* function = loaded[context][key]) {
      return function;
    }
  }
  // Not under the lock: the front end takes the GIL, which a thread that waits for the lock may hold.
  const auto start = std::chrono::steady_clock::now();
  CUfunc_st* fresh = Driver::get().load(frontend::ptx(launch.file, launch.kernel, sizes, launch.function_constants),
                                        entry_name(launch.kernel));
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
  note_compiled(launch.file, launch.kernel, waited.count());
  std::lock_guard lock(mutex);
  CUfunc_st*& first = loaded[context][key];  // of several threads, the first one's is kept
  first = first ? first : fresh;
  return first;
}

// Each thread caches its lookups, by the name alone where that tells kernels apart, and by the device, since MLX uses
// one context of each: this is on the path of every call.
CUfunc_st* function_of(const Launch& launch, mx::Stream stream) {
  struct Known {
    int device = 0;
    Name file;
    CUfunc_st* function = nullptr;
  };
  static thread_local std::unordered_map<Name, Known> known;
  const auto sizes = sizes_by_value(launch);
  if (!sizes.empty() || !launch.function_constants.empty()) {
    return loaded_function(launch, sizes);
  }
  Known& mine = known[launch.kernel];
  if (!mine.function || mine.device != stream.device.index || mine.file != launch.file) {
    mine = {stream.device.index, launch.file, loaded_function(launch, sizes)};
  }
  return mine.function;
}

void* address(const mx::array& array) {
  const auto* buffer = static_cast<const mlx_internals::CudaBuffer*>(array.buffer().ptr());
  return static_cast<char*>(buffer->data) + array.offset();
}

dim3 dimensions(const Size3& size) {
  return {size.x, size.y, size.z};
}

}  // namespace

bool available() {
  return mlx_internals::is_known() && mlx_internals::kCudaIsKnown && mlx_internals::has_cuda_encoder();
}

Device device(int index) {
  return Driver::get().device(index);
}

std::string_view missing() {
  if (!mlx_internals::has_cuda_encoder()) {
    return "this MLX was built without CUDA: pip install \"mlx[cuda13]==" MITTENS_MLX_VERSION "\"";
  }
  if (!mlx_internals::is_known()) {
    return mlx_internals::problem();
  }
  if (!mlx_internals::kCudaIsKnown) {
    return "the CUDA encoder of mlx " MITTENS_MLX_VERSION
           " is not known: pip install \"mlx[cuda13]==" MITTENS_KNOWN_MLX_VERSION "\"";
  }
  if (!Driver::get().loaded()) {
    return "libcuda.so.1 does not load: install the NVIDIA driver";
  }
  return "";
}

void keep_until_done(std::vector<mx::array> arrays, mx::Stream stream) {
  mx::cu::get_command_encoder(stream).add_completed_handler([arrays = std::move(arrays)] {});
}

void run(const Launch& launch, mx::Stream stream) {
  CUfunc_st* function = function_of(launch, stream);
  auto& encoder = mx::cu::get_command_encoder(stream);
  static std::array<std::byte, 4096> nothing{};  // as long as all parameters of a kernel may be
  constexpr size_t most_arguments = 31;  // that Metal numbers
  std::array<void*, most_arguments> addresses;
  std::array<void*, most_arguments> arguments;
  size_t count = 0;
  // An array may stand in for others that are not there: MLX need hear of it but once.
  std::array<const mx::array*, most_arguments> told;
  auto told_end = told.begin();
  if (launch.arguments.size() > most_arguments) {
    throw std::runtime_error("kernel " + launch.kernel.text() + " takes more than 31 buffers");
  }
  for (size_t i = 0; i < launch.arguments.size(); ++i) {
    std::visit(Visitor{
                   [&](const Input& input) {
                     const mx::array* array = &input.array.get();
                     if (std::find(told.begin(), told_end, array) == told_end) {
                       // MLX's graph has a kernel wait for the writers of its inputs, but not for the readers of memory
                       // that it overwrites; where arrays are counted apart, nothing else does.
                       owner_of(*array) ? encoder.set_output_array(*array) : encoder.set_input_array(*array);
                       *told_end++ = array;
                     }
                     addresses[i] = static_cast<char*>(address(input.array)) + input.offset;
                     arguments[count++] = &addresses[i];
                   },
                   [&](const Output& output) {
                     encoder.set_output_array(output.array);
                     addresses[i] = address(output.array);
                     arguments[count++] = &addresses[i];
                   },
                   [&](const Bytes& bytes) { arguments[count++] = const_cast<std::byte*>(bytes.data.data()); },
                   [&](const Absent& absent) {
                     if (absent.declared) {
                       arguments[count++] = nothing.data();
                     }
                   },
               },
               launch.arguments[i]);
  }
  encoder.add_kernel_node_raw(function, dimensions(launch.threadgroups), dimensions(launch.threads), {1, 1, 1},
                              launch.threadgroup_bytes, arguments.data());
}

}  // namespace mittens::cuda

#else

namespace mittens::cuda {

bool available() {
  return false;
}

std::string_view missing() {
  return "CUDA is for Linux";
}

Device device(int) {
  throw std::runtime_error("CUDA is for Linux");
}

void keep_until_done(std::vector<mx::array>, mx::Stream) {}

void run(const Launch& launch, mx::Stream) {
  throw std::runtime_error("kernel " + launch.kernel.text() + ": CUDA is for Linux");
}

}  // namespace mittens::cuda

#endif
