// Opens a compiled kernel library, once for each path.
#include <dlfcn.h>
#ifdef __linux__
#include <link.h>
#endif

#include <cstring>
#include <map>
#include <mutex>

#include "simulator/runtime.h"
#include "simulator/simulator.h"

namespace mittens::simulator {

std::shared_ptr<Library> Library::at(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<Library>> by_path;
  std::lock_guard lock(mutex);
  auto& library = by_path[path];
  if (!library) {
    library = open(path);
  }
  return library;
}

std::shared_ptr<Library> Library::open(const std::string& path) {
#ifdef __linux__
  // Kernel libraries are linked against nothing; the mathematics that they call must be there to be found.
  static void* const mathematics = dlopen("libm.so.6", RTLD_NOW | RTLD_GLOBAL);
  (void)mathematics;
#endif
  std::shared_ptr<Library> library(new Library());
  library->path_ = path;
  library->handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library->handle_) {
    throw std::runtime_error(std::string("a compiled kernel does not load: ") + dlerror());
  }
  const auto open = reinterpret_cast<abi::Open>(dlsym(library->handle_, "mittens_library"));
  library->table_ = open ? open(runtime()) : nullptr;
  if (!library->table_ || library->table_->version != abi::version) {
    throw std::runtime_error(path + " was compiled for another simulator than this one");
  }
#ifdef __linux__
  struct link_map* map = nullptr;
  if (dlinfo(library->handle_, RTLD_DI_LINKMAP, &map) == 0) {
    library->base_ = map->l_addr;
    struct Search {
      Library* library;
      const char* name;
    } search{library.get(), map->l_name};
    dl_iterate_phdr(
        [](struct dl_phdr_info* info, size_t, void* data) {
          const auto* search = static_cast<Search*>(data);
          if (std::strcmp(info->dlpi_name, search->name) != 0) {
            return 0;
          }
          search->library->image_begin_ = UINTPTR_MAX;
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& header = info->dlpi_phdr[i];
            if (header.p_type == PT_LOAD) {
              const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
              search->library->image_begin_ = std::min<uintptr_t>(search->library->image_begin_, begin);
              search->library->image_end_ = std::max<uintptr_t>(search->library->image_end_, begin + header.p_memsz);
            }
          }
          return 1;
        },
        &search);
  }
#endif
  return library;
}

Library::~Library() {
  if (handle_) {
    dlclose(handle_);
  }
}

const abi::Kernel* Library::find(const std::string& name) const {
  for (unsigned i = 0; i < table_->kernel_count; ++i) {
    if (name == table_->kernels[i].name) {
      return &table_->kernels[i];
    }
  }
  return nullptr;
}

std::vector<std::string> Library::kernels() const {
  std::vector<std::string> names;
  for (unsigned i = 0; i < table_->kernel_count; ++i) {
    names.emplace_back(table_->kernels[i].name);
  }
  return names;
}

}  // namespace mittens::simulator
