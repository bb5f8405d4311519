// SPDX-License-Identifier: Apache-2.0

#include "torch_call.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "calls.h"
#include "torch_arguments.h"
#include "torch_view.h"

namespace nb = nanobind;

namespace transformer_engine {
namespace thd_rope {
namespace {

// Fills in the parameters, all but the output, and the view of t; false if the call is not plain.
bool read_call(const TorchCall &arguments, ThdRopeParams *params, TensorView *view) {
  TensorView &t = *view;
  if (!view_tensor(arguments.t, &t) || !is_plain_type(arguments.t) || t.ndim != 3 ||
      t.dtype > ViewType::kBFloat16 || t.device == kOtherDevice || is_negated(arguments.t) ||
      !PyBool_Check(arguments.interleaved.ptr())) {
    return false;
  }
  // Elements without memory: a fake tensor, or a wrapper around others.
  if (!t.has_memory() || t.shape[1] > kMaxRowExtent || t.shape[2] > kMaxRowExtent) return false;
  PackedBatch *batch = &params->batch;
  AngleTable table;
  if (!read_table(arguments.freqs, t.device, t.shape[2], &table) ||
      !read_batch(arguments.cu_seqlens, arguments.start_positions, t.device, batch) ||
      !read_ranks(arguments.cp_size, arguments.cp_rank, batch)) {
    return false;
  }
  params->freqs = table.freqs;
  params->rotary_dim = table.rotary_dim;
  batch->table_rows = table.rows;
  params->input = t.data;
  params->num_tokens = t.shape[0];
  params->num_heads = static_cast<int32_t>(t.shape[1]);
  params->head_dim = static_cast<int32_t>(t.shape[2]);
  params->stride_t = t.strides[0];
  params->stride_h = t.strides[1];
  params->stride_d = t.strides[2];
  params->dtype = static_cast<DataType>(t.dtype);
  params->interleaved = arguments.interleaved.is(nb::handle(Py_True));
  params->transpose = arguments.transpose;
  return true;
}

nb::object rotate_plain_on(const TorchCall &arguments, PathRequest request) {
  ThdRopeParams params{};
  TensorView t;
  try {
    if (!read_call(arguments, &params, &t)) return nb::none();
  } catch (const nb::python_error &) {  // sparse, nested, ...: checks.py has better words
    if (arguments.prepared) throw;
    return nb::none();
  }
  TensorView view;
  nb::object output = empty_like(arguments.t, t, &view);
  params.output = view.data;
  const Target target = t.device == kCpuDevice ? Target{kCpuDevice, 0, num_cpu_threads()}
                                               : Target{t.device, current_stream(t.device), 0};
  run_call(params, request, target, arguments.routed);
  return output;
}

// input, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank
constexpr Py_ssize_t kNumArguments = 8;
constexpr int kFormatArgument = 3;

// What a routed function is made of. Never freed, as a function may be kept by anybody.
struct Routed {
  nb::object original, prepare, give_up, thd_format, router_switch;
  const RouterSwitch *active_switch;
  bool transpose;
  std::string name, doc;
  PyMethodDef definition;
};

nb::object call_object(const nb::object &function, PyObject *const *arguments, Py_ssize_t number,
                       PyObject *names) {
  PyObject *const result = PyObject_Vectorcall(function.ptr(), arguments, number, names);
  if (result == nullptr) nb::raise_python_error();
  return nb::steal(result);
}

nb::object pass_through(const Routed &routed, PyObject *const *arguments, Py_ssize_t number,
                        PyObject *names) {
  counters().passed_through.fetch_add(1, std::memory_order_relaxed);
  return call_object(routed.original, arguments, number, names);
}

bool is_thd(const Routed &routed, PyObject *format) {
  if (format == routed.thd_format.ptr()) return true;  // as TransformerEngine passes it
  if (Py_TYPE(format) != Py_TYPE(routed.thd_format.ptr())) return false;
  const int equal = PyObject_RichCompareBool(format, routed.thd_format.ptr(), Py_EQ);
  if (equal < 0) nb::raise_python_error();
  return equal != 0;
}

// Whether checked mode is on, or set to something that it has an error for. checked.py knows which:
// here is only who has nothing to ask it, which costs a routed call one look at the environment.
bool may_be_checked() {
  const char *const value = std::getenv("TE_OVERLAY_CHECK");
  return value != nullptr && std::strcmp(value, "0") != 0;
}

nb::object route(const Routed &routed, PyObject *const *a, Py_ssize_t number, PyObject *names) {
  const bool covered = number == kNumArguments && names == nullptr &&
                       routed.active_switch->active && is_thd(routed, a[kFormatArgument]);
  if (!covered) return pass_through(routed, a, number, names);
  const PathRequest request = request_from_environment();
  if (request == PathRequest::kLegacyGrid) return pass_through(routed, a, number, names);
  if (may_be_checked()) return call_object(routed.prepare, a, number, nullptr);
  const TorchCall arguments{a[0], a[1], a[2], a[4], a[5], a[6], a[7], routed.transpose,
                            true, false};
  try {
    nb::object output = rotate_plain_on(arguments, request);
    if (!output.is_none()) return output;
  } catch (const UnsupportedDevice &error) {
    routed.give_up(error.what());
    return pass_through(routed, a, number, names);
  }
  return call_object(routed.prepare, a, number, nullptr);
}

// What a routed function is bound to: a module of its own that nobody imports, whose state is the
// function's Routed. A function of a module is pickled by its name, as a pybind11 function is; one
// of a capsule could not be.
PyModuleDef routed_owner{PyModuleDef_HEAD_INIT,
                         "transformer_engine_overlay._routed",
                         nullptr,
                         sizeof(const Routed *),
                         nullptr,
                         nullptr,
                         nullptr,
                         nullptr,
                         nullptr};

const Routed **state_of(PyObject *owner) {
  return static_cast<const Routed **>(PyModule_GetState(owner));
}

// The entry from Python: exceptions stop here and become Python's.
PyObject *call_routed(PyObject *self, PyObject *const *arguments, Py_ssize_t number,
                      PyObject *names) {
  try {
    return route(**state_of(self), arguments, number, names).release().ptr();
  } catch (nb::python_error &error) {
    error.restore();
  } catch (const std::invalid_argument &error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc &) {
    PyErr_NoMemory();
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace

nb::object rotate_plain(const TorchCall &arguments) {
  // Read while this thread holds the GIL, so that no other one changes the environment meanwhile.
  return rotate_plain_on(arguments, request_from_environment());
}

nb::object make_routed(nb::object original, nb::object prepare, nb::object give_up,
                       nb::object thd_format, nb::object router_switch, bool transpose) {
  auto *routed = new Routed{original, prepare,   give_up, thd_format, router_switch,
                            nullptr,  transpose, {},      {},         {}};
  routed->active_switch = nb::cast<const RouterSwitch *>(router_switch);
  routed->name = nb::cast<const char *>(original.attr("__name__"));
  const nb::object doc = original.attr("__doc__");
  if (!doc.is_none()) routed->doc = nb::cast<const char *>(doc);
  routed->definition = {routed->name.c_str(),
                        reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(&call_routed)),
                        METH_FASTCALL | METH_KEYWORDS, routed->doc.c_str()};
  const nb::object owner = nb::steal(PyModule_Create(&routed_owner));
  if (!owner.is_valid()) nb::raise_python_error();
  *state_of(owner.ptr()) = routed;
  const nb::object module = original.attr("__module__");
  PyObject *const function = PyCFunction_NewEx(&routed->definition, owner.ptr(), module.ptr());
  if (function == nullptr) nb::raise_python_error();
  return nb::steal(function);
}

}  // namespace thd_rope
}  // namespace transformer_engine
