#include "python/interrupt.h"

#include "python/registry.h"
#include "simulator/simulator.h"

namespace nb = nanobind;

namespace mittens {

void throw_if_interrupted() {
  if (!Py_IsInitialized()) {
    return;
  }
  nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw Interrupted(nb::python_error());
  }
}

namespace {

void bind(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Interrupted& interrupted) {
      interrupted.restore();
    }
  });
  simulator::set_poll(&throw_if_interrupted);
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
