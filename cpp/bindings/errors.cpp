#include "bindings/errors.h"

#include <nanobind/stl/string.h>  // casts std::string; without it a DriverError became bad_cast

#include <exception>

#include "vtensor/ops/mapping.h"
#include "vtensor/util/error.h"

namespace nb = nanobind;

namespace vtensor {
namespace {

// Plain pointers: the classes live as long as the process.
struct ErrorClasses {
  PyObject* base = nullptr;
  PyObject* out_of_memory = nullptr;
  PyObject* driver = nullptr;
  PyObject* mapping_limit = nullptr;
  PyObject* released = nullptr;
  PyObject* integrity = nullptr;
};

ErrorClasses classes;

PyObject* make_class(nb::module_& module, const char* name, const char* doc, nb::tuple bases) {
  const std::string full_name = std::string("flexinfer.errors.") + name;
  PyObject* made = PyErr_NewExceptionWithDoc(full_name.c_str(), doc, bases.ptr(), nullptr);
  if (made == nullptr) nb::raise_python_error();
  module.attr(name) = nb::borrow(made);
  return made;
}

nb::object instance(PyObject* type, const char* text) {
  return nb::borrow<nb::object>(type)(nb::str(text));
}

void raise(PyObject* type, const nb::object& error) { PyErr_SetObject(type, error.ptr()); }

void raise_driver_error(PyObject* type, const DriverError& e) {
  nb::object error = instance(type, e.what());
  error.attr("call") = e.call();
  error.attr("code") = e.code();
  error.attr("code_name") = e.code_name();
  error.attr("arguments") = e.arguments();
  raise(type, error);
}

void raise_out_of_memory(const OutOfMemoryError& e) {
  nb::object error = instance(classes.out_of_memory, e.what());
  error.attr("asked_bytes") = e.asked_bytes();
  error.attr("free_bytes") = e.free_bytes();
  error.attr("budget_bytes") = e.budget_bytes();
  raise(classes.out_of_memory, error);
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const OutOfMemoryError& e) {
    raise_out_of_memory(e);
  } catch (const MappingLimitError& e) {
    raise_driver_error(classes.mapping_limit, e);
  } catch (const DriverError& e) {
    raise_driver_error(classes.driver, e);
  } catch (const ReleasedError& e) {
    PyErr_SetString(classes.released, e.what());
  } catch (const IntegrityError& e) {
    PyErr_SetString(classes.integrity, e.what());
  } catch (const Error& e) {
    PyErr_SetString(classes.base, e.what());
  }
}

}  // namespace

void bind_errors(nb::module_& module) {
  const auto builtin = [](PyObject* type) { return nb::borrow(type); };
  classes.base = make_class(module, "VTensorError", "Base of all errors of the vTensor core.",
                            nb::make_tuple(builtin(PyExc_Exception)));
  const nb::object base = nb::borrow(classes.base);
  classes.out_of_memory =
      make_class(module, "OutOfMemoryError",
                 "Physical memory or the budget is exhausted.\n\n"
                 "Attributes: asked_bytes, free_bytes (what could be obtained), budget_bytes.",
                 nb::make_tuple(base, builtin(PyExc_MemoryError)));
  classes.driver = make_class(module, "DriverError",
                              "A driver call failed.\n\n"
                              "Attributes: call, code, code_name, arguments.",
                              nb::make_tuple(base));
  classes.mapping_limit =
      make_class(module, "MappingLimitError",
                 "The system's limit on mappings is near; the message names it and the remedy.",
                 nb::make_tuple(nb::borrow(classes.driver)));
  classes.released =
      make_class(module, "ReleasedError", "A vTensor or a manager was used after its release.",
                 nb::make_tuple(base, builtin(PyExc_LookupError)));
  classes.integrity =
      make_class(module, "IntegrityError", "check_integrity() found a broken invariant.",
                 nb::make_tuple(base));
  nb::register_exception_translator(translate);
}

}  // namespace vtensor
