#include "launch/cuda.h"

#include <stdexcept>

#ifdef __linux__
#include <dlfcn.h>

#include <array>
#include <cctype>
#include <functional>
#include <map>
#include <mutex>
#include <tuple>

#include "launch/frontend.h"
#include "launch/visitor.h"

struct CUfunc_st;
struct dim3 {
  unsigned int x, y, z;
};

// The few members that are needed of MLX's CUDA command encoder. Weak: in an MLX without CUDA they are null.
namespace mlx::core::cu {

class __attribute__((visibility("default"))) CommandEncoder {
 public:
  __attribute__((weak)) void set_input_array(const array& input);
  __attribute__((weak)) void set_output_array(const array& output);
  __attribute__((weak)) void add_completed_handler(std::function<void()> task);
  __attribute__((weak)) void add_kernel_node_raw(CUfunc_st* function, dim3 grid, dim3 block, dim3 cluster,
                                                 uint32_t shared_bytes, void** arguments);
};

__attribute__((weak)) CommandEncoder& get_command_encoder(Stream stream);

}  // namespace mlx::core::cu

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

// Loaded once per context and kept for the life of the process, as MLX keeps its own modules.
CUfunc_st* function_of(const Launch& launch) {
  using Key = std::tuple<void*, std::string, std::string>;
  static std::mutex mutex;
  static std::map<Key, CUfunc_st*> functions;
  const Driver& driver = Driver::get();
  const Key key{driver.current_context(), launch.file, launch.kernel};
  {
    std::lock_guard lock(mutex);
    if (auto found = functions.find(key); found != functions.end()) {
      return found->second;
    }
  }
  // Not under the lock: the front end takes the GIL, which a thread that waits for the lock may hold.
  CUfunc_st* function = driver.load(frontend::ptx(launch.file, launch.kernel), entry_name(launch.kernel));
  std::lock_guard lock(mutex);
  return functions.emplace(key, function).first->second;
}

// What an array's buffer points to in MLX's CUDA build.
struct CudaBuffer {
  void* data;
  size_t size;
  int device;
};

void* address(const mx::array& array) {
  const auto* buffer = static_cast<const CudaBuffer*>(array.buffer().ptr());
  return static_cast<char*>(buffer->data) + array.offset();
}

dim3 dimensions(const Size3& size) {
  return {size.x, size.y, size.z};
}

}  // namespace

bool available() {
  return &mx::cu::get_command_encoder != nullptr;
}

std::string missing() {
  if (!available()) {
    return "this MLX was built without CUDA: pip install \"mlx[cuda13]==" + std::string(MITTENS_MLX_VERSION) + "\"";
  }
  if (!Driver::get().loaded()) {
    return "libcuda.so.1 does not load: install the NVIDIA driver";
  }
  return "";
}

void keep_until_done(const mx::array& array, mx::Stream stream) {
  mx::cu::get_command_encoder(stream).add_completed_handler([array] {});
}

void run(const Launch& launch, mx::Stream stream) {
  CUfunc_st* function = function_of(launch);
  auto& encoder = mx::cu::get_command_encoder(stream);
  std::vector<void*> addresses(launch.arguments.size());
  std::vector<void*> arguments(launch.arguments.size());
  for (size_t i = 0; i < launch.arguments.size(); ++i) {
    arguments[i] = &addresses[i];
    std::visit(
        Visitor{
            [&](const Input& input) {
              encoder.set_input_array(input.array);
              addresses[i] = static_cast<char*>(address(input.array)) + input.offset;
            },
            [&](const Output& output) {
              encoder.set_output_array(output.array);
              addresses[i] = address(output.array);
            },
            [&](const Bytes& bytes) { arguments[i] = const_cast<std::byte*>(bytes.data.data()); },
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

std::string missing() {
  return "CUDA is for Linux";
}

void keep_until_done(const mx::array&, mx::Stream) {}

void run(const Launch& launch, mx::Stream) {
  throw std::runtime_error("kernel " + launch.kernel + ": CUDA is for Linux");
}

}  // namespace mittens::cuda

#endif
