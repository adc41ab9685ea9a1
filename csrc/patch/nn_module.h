// How a layer of mlx.nn, or another object of Python's, is read.
#pragma once

#include <optional>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "mlx/array.h"
#include "python/array_caster.h"

namespace mittens {

// A name as Python keeps it, for as long as the process lives.
inline PyObject* name(const char* text) {
  return PyUnicode_InternFromString(text);
}

// A layer is a dict of its arrays and layers. A null handle where there is no such entry.
inline nanobind::handle entry(const nanobind::dict& layer, PyObject* key) {
  return PyDict_GetItemWithError(layer.ptr(), key);
}

// Null where it is no array.
inline mlx::core::array* as_array(nanobind::handle object) {
  const bool is_array = object.is_valid() && nanobind::isinstance<mlx::core::array>(object);
  return is_array ? nanobind::inst_ptr<mlx::core::array>(object) : nullptr;
}

// Nothing where there is no such array.
inline std::optional<mlx::core::array> array(const nanobind::dict& layer, PyObject* key) {
  const mlx::core::array* found = as_array(entry(layer, key));
  return found ? std::optional(*found) : std::nullopt;
}

// An attribute that is neither an array nor a layer.
inline nanobind::object attribute(nanobind::handle object, PyObject* key) {
  return nanobind::steal(nanobind::detail::getattr(object.ptr(), key));
}

template <typename T>
T attribute(nanobind::handle object, PyObject* key) {
  return nanobind::cast<T>(attribute(object, key));
}

// A member of an imported module; null if the module has not been imported, or has no such member.
inline nanobind::object member(PyObject* module, PyObject* key) {
  const nanobind::object home = nanobind::steal(PyImport_GetModule(module));
  if (!home.is_valid()) {
    return {};
  }
  PyObject* found = PyObject_GetAttr(home.ptr(), key);
  if (!found) {
    PyErr_Clear();
  }
  return nanobind::steal(found);
}

// How mlx.nn.RoPE turns, or mlx-lm's of Llama 3, which has frequencies in the place of a base.
struct RopeLayer {
  int dims;
  bool traditional;
  std::optional<float> base;
  float scale;
  std::optional<mlx::core::array> freqs;
};

inline RopeLayer read_rope(const nanobind::dict& layer) {
  static PyObject* const dims = name("dims");
  static PyObject* const traditional = name("traditional");
  static PyObject* const base = name("base");
  static PyObject* const scale = name("scale");
  static PyObject* const freqs = name("_freqs");
  RopeLayer rope{attribute<int>(layer, dims), attribute<bool>(layer, traditional), std::nullopt, 1.0f,
                 array(layer, freqs)};
  if (!rope.freqs) {
    rope.base = attribute<std::optional<float>>(layer, base);
    rope.scale = attribute<float>(layer, scale);
  }
  return rope;
}

}  // namespace mittens
