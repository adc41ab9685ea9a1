// Whether modules still hold the same parameters: a layer that stands for several asks it at every token. An array
// counts as another once it was assigned to in place, which leaves Python's object the same.
#include <optional>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "mlx/array.h"
#include "python/registry.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace mittens {

namespace {

// A parameter of a module: the key, Python's object, and the array that it had.
struct Parameter {
  nb::object key;
  nb::object value;
  std::optional<mx::array> array;

  bool is(nb::handle now) const {
    if (!array) {
      return now.is(value);
    }
    return now.is_valid() && now.type().is(value.type()) && nb::inst_ptr<mx::array>(now)->id() == array->id();
  }
};

// Lookups must leave no Python error behind: a key that cannot be looked up has changed.
nb::handle item(nb::handle dict, nb::handle key) {
  PyObject* found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (!found) {
    PyErr_Clear();
  }
  return found;
}

class Part {
 public:
  // A module of mlx.nn is a dict of its parameters and modules; its other attributes are numbers and names.
  Part(nb::object name, nb::dict module) : key_(std::move(name)), module_(module) {
    for (auto [key, value] : module_) {
      std::optional<mx::array> array;
      if (nb::isinstance<mx::array>(value)) {
        array = nb::cast<mx::array>(value);
      }
      parameters_.push_back({nb::borrow(key), nb::borrow(value), std::move(array)});
    }
    attributes_ = nb::borrow<nb::dict>(module.attr("__dict__"));
    for (auto [key, value] : attributes_) {
      if (nb::cast<const char*>(key)[0] != '_') {  // leaves out _training and _no_grad
        numbers_.push_back({nb::borrow(key), nb::borrow(value)});
      }
    }
  }

  bool is_of(const nb::dict& owner) const {
    return item(owner, key_).is(module_) && holds_its_parameters() && has_its_numbers();
  }

 private:
  bool holds_its_parameters() const {
    if (nb::len(module_) != parameters_.size()) {
      return false;
    }
    for (const auto& parameter : parameters_) {
      if (!parameter.is(item(module_, parameter.key))) {
        return false;
      }
    }
    return true;
  }

  bool has_its_numbers() const {
    for (const auto& [key, value] : numbers_) {
      const nb::object now = nb::borrow(item(attributes_, key));
      const int equal = now.is_valid() ? PyObject_RichCompareBool(now.ptr(), value.ptr(), Py_EQ) : 0;
      if (equal != 1) {
        PyErr_Clear();
        return false;
      }
    }
    return true;
  }

  nb::object key_;
  nb::dict module_;
  nb::dict attributes_;
  std::vector<Parameter> parameters_;
  std::vector<std::pair<nb::object, nb::object>> numbers_;
};

class ModuleParts {
 public:
  explicit ModuleParts(const nb::dict& modules) {
    for (auto [key, module] : modules) {
      parts_.emplace_back(nb::borrow(key), nb::cast<nb::dict>(module));
    }
  }

  bool are_those_of(const nb::dict& owner) const {
    for (const auto& part : parts_) {
      if (!part.is_of(owner)) {
        return false;
      }
    }
    return true;
  }

 private:
  std::vector<Part> parts_;
};

void bind(nb::module_& module) {
  nb::class_<ModuleParts>(module, "ModuleParts", "Modules by their names in another one, with what they hold.")
      .def(nb::init<const nb::dict&>(), "modules"_a)
      .def("are_those_of", &ModuleParts::are_those_of, "owner"_a,
           "Whether a module has these very modules, and they the arrays and numbers that they had.");
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
