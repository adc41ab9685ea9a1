// A function in another's place: for the patch one of mx's or mlx-lm's, where it calls an op's attempt, and the
// original where that gives nothing or MLX exports; for an op of our own the declaration in Python. A type of Python's
// own, since a function of Python's that hands its arguments on takes up to 0.3 us, as long as building an op does.
#include "patch/function_wrapper.h"

#include <cstddef>
#include <string>

#include <structmember.h>

#include "python/registry.h"
#include "runtime/exporting.h"
#include "runtime/fallback.h"

namespace nb = nanobind;

namespace mittens {

namespace {

struct FunctionWrapper {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* op;  // its name in messages and counts
  PyObject* original;
  PyObject* attempt;  // or None
  PyObject* dict;  // __wrapped__ and its like
  PyObject* weak;  // references
  bool strict;  // a call that goes to the original is an error in the end
};

FunctionWrapper* own(PyObject* self) {
  return reinterpret_cast<FunctionWrapper*>(self);
}

const char* op_of(PyObject* self) {
  return PyUnicode_AsUTF8(own(self)->op);
}

PyObject* call(PyObject* self, PyObject* const* args, size_t flagged, PyObject* names) {
  const nb::object attempt = nb::borrow(own(self)->attempt);  // another thread may replace it meanwhile
  const size_t count = PyVectorcall_NARGS(flagged);
  const bool aside = exporting();
  if (!aside && attempt.is_valid() && !attempt.is_none()) {
    PyObject* result = PyObject_Vectorcall(attempt.ptr(), args, count, names);
    if (result && result != Py_None) {
      return result;
    }
    if (result) {
      Py_DECREF(result);
    } else if (PyErr_ExceptionMatches(
                   PyExc_TypeError)) {  // something else than arrays: mx takes it, or raises its own error
      PyErr_Clear();
      note_fallback(op_of(self), "arguments of other types");
    } else {
      return nullptr;
    }
  }
  const nb::object original = nb::borrow(own(self)->original);
  if (!original.is_valid()) {
    PyErr_Format(PyExc_TypeError, "[%s] the original function was deleted", op_of(self));
    return nullptr;
  }
  PyObject* result = PyObject_Vectorcall(original.ptr(), args, count, names);
  if (result && own(self)->strict && !aside) {
    Py_DECREF(result);
    PyErr_Format(PyExc_RuntimeError, "[%s] strict patch: no kernel of mlx_mittens covers %s", op_of(self),
                 last_reason().c_str());
    return nullptr;
  }
  return result;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* names) {
  PyObject* op;
  PyObject* original;
  static const char* keywords[] = {"op", "original", nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, names, "UO:FunctionWrapper", const_cast<char**>(keywords), &op, &original)) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self) {
    own(self)->vectorcall = call;
    own(self)->op = Py_NewRef(op);
    own(self)->original = Py_NewRef(original);
    own(self)->attempt = Py_NewRef(Py_None);
  }
  return self;
}

// As a method of a class it is bound, as functions are.
PyObject* bound(PyObject* self, PyObject* object, PyObject*) {
  return object ? PyMethod_New(self, object) : Py_NewRef(self);
}

PyObject* shown(PyObject* self) {
  return PyUnicode_FromFormat("<function %U of mlx_mittens>", own(self)->op);
}

// Another process finds it by its name, as it does functions.
PyObject* reduced(PyObject* self, PyObject*) {
  return PyObject_GetAttrString(self, "__qualname__");
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(own(self)->original);
  Py_VISIT(own(self)->attempt);
  Py_VISIT(own(self)->dict);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(own(self)->original);
  Py_CLEAR(own(self)->attempt);
  Py_CLEAR(own(self)->dict);
  return 0;
}

void destroy(PyObject* self) {
  PyObject_GC_UnTrack(self);
  if (own(self)->weak) {
    PyObject_ClearWeakRefs(self);
  }
  clear(self);
  Py_CLEAR(own(self)->op);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"__reduce__", reduced, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef members[] = {
    {"attempt", T_OBJECT, offsetof(FunctionWrapper, attempt), 0, "What is called first, or None."},
    {"original", T_OBJECT_EX, offsetof(FunctionWrapper, original), 0, "What is called where the attempt gives None."},
    {"strict", T_BOOL, offsetof(FunctionWrapper, strict), 0, "Whether a call that goes to the original is an error."},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FunctionWrapper, vectorcall), READONLY, nullptr},
    {"__dictoffset__", T_PYSSIZET, offsetof(FunctionWrapper, dict), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(FunctionWrapper, weak), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef attributes[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc,
     const_cast<char*>("A function in another's place: FunctionWrapper(op, original) calls its attempt, and the "
                       "original where that is None or gives None.")},
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_descr_get, reinterpret_cast<void*>(bound)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_repr, reinterpret_cast<void*>(shown)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, attributes},
    {0, nullptr},
};

PyType_Spec spec = {"mlx_mittens._ext.FunctionWrapper", sizeof(FunctionWrapper), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
                    slots};

PyObject* type = nullptr;  // as long as the process lives

void bind(nb::module_& module) {
  type = PyType_FromSpec(&spec);
  module.attr("FunctionWrapper") = nb::borrow(type);
}

const Register registered(bind);

}  // namespace

bool is_patched(nb::handle object) {
  if (!object.is_valid() || !object.type().is(type)) {
    return false;
  }
  const PyObject* attempt = own(object.ptr())->attempt;
  return attempt && attempt != Py_None;
}

}  // namespace mittens
