// SPDX-License-Identifier: Apache-2.0

#include "torch_call.h"

#include <array>
#include <stdexcept>
#include <string>

#include "calls.h"

namespace nb = nanobind;

namespace transformer_engine {
namespace thd_rope {
namespace {

// What is looked up in torch once. Never freed: it outlives the interpreter's own clean-up.
struct Torch {
  nb::object module = nb::module_::import_("torch");
  nb::object tensor_type = module.attr("Tensor");
  nb::object strided = module.attr("strided");
  nb::object int32 = module.attr("int32");
  nb::object contiguous_format = module.attr("contiguous_format");
  // by DataType
  std::array<nb::object, 3> dtypes = {module.attr("float32"), module.attr("float16"),
                                      module.attr("bfloat16")};
  // The raw handle of the stream, where this torch has it, without a Python object around it.
  nb::object raw_stream = nb::getattr(module.attr("_C"), "_cuda_getCurrentRawStream", nb::none());
  nb::object current_stream = module.attr("cuda").attr("current_stream");

  nb::str s_dtype = intern("dtype"), s_shape = intern("shape"), s_stride = intern("stride"),
          s_layout = intern("layout"), s_get_device = intern("get_device"),
          s_data_ptr = intern("data_ptr"), s_is_cuda = intern("is_cuda"),
          s_is_cpu = intern("is_cpu"), s_is_contiguous = intern("is_contiguous"),
          s_empty_like = intern("empty_like"), s_cuda_stream = intern("cuda_stream"),
          s_get_num_threads = intern("get_num_threads"), s_is_neg = intern("is_neg");
  nb::tuple empty_like_names = nb::make_tuple(intern("memory_format"));

  static nb::str intern(const char *text) {
    return nb::steal<nb::str>(PyUnicode_InternFromString(text));
  }
};

const Torch &torch() {
  static const Torch *const instance = new Torch();
  return *instance;
}

nb::object steal_checked(PyObject *object) {
  if (object == nullptr) nb::raise_python_error();
  return nb::steal(object);
}

nb::object get(nb::handle object, const nb::str &name) {
  return steal_checked(PyObject_GetAttr(object.ptr(), name.ptr()));
}

nb::object call(nb::handle object, const nb::str &name) {
  return steal_checked(PyObject_CallMethodNoArgs(object.ptr(), name.ptr()));
}

int64_t to_int(nb::handle object) {
  const int64_t value = PyLong_AsLongLong(object.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) nb::raise_python_error();
  return value;
}

uintptr_t to_address(nb::handle object) {
  const uint64_t value = PyLong_AsUnsignedLongLong(object.ptr());
  if (value == static_cast<uint64_t>(-1) && PyErr_Occurred() != nullptr) nb::raise_python_error();
  return static_cast<uintptr_t>(value);
}

bool is_true(nb::handle object) {
  const int value = PyObject_IsTrue(object.ptr());
  if (value < 0) nb::raise_python_error();
  return value != 0;
}

bool is_tensor(nb::handle object) {
  return PyObject_TypeCheck(object.ptr(),
                            reinterpret_cast<PyTypeObject *>(torch().tensor_type.ptr())) != 0;
}

// Reads a tuple of `n` integers; false if it has another length.
template <size_t n>
bool read_ints(const nb::object &tuple, std::array<int64_t, n> *values) {
  if (!PyTuple_Check(tuple.ptr()) || PyTuple_GET_SIZE(tuple.ptr()) != static_cast<Py_ssize_t>(n)) {
    return false;
  }
  for (size_t i = 0; i < n; ++i) (*values)[i] = to_int(PyTuple_GET_ITEM(tuple.ptr(), i));
  return true;
}

int64_t device_of(nb::handle tensor) { return to_int(call(tensor, torch().s_get_device)); }

uintptr_t address_of(nb::handle tensor) { return to_address(call(tensor, torch().s_data_ptr)); }

bool is_on(nb::handle tensor, int64_t device) {
  if (device_of(tensor) != device) return false;
  return device >= 0 || is_true(get(tensor, torch().s_is_cpu));  // -1 is other devices' too
}

// Metadata: a contiguous int32 vector on `device` with at least `min_entries` entries.
bool read_metadata(nb::handle value, int64_t device, int64_t min_entries, const int32_t **address,
                   int64_t *entries) {
  std::array<int64_t, 1> shape;
  if (!is_tensor(value) || !get(value, torch().s_dtype).is(torch().int32) ||
      !read_ints(get(value, torch().s_shape), &shape) || shape[0] < min_entries ||
      !is_on(value, device) || !is_true(call(value, torch().s_is_contiguous))) {
    return false;
  }
  *entries = shape[0];
  *address = reinterpret_cast<const int32_t *>(address_of(value));
  return *entries == 0 || *address != nullptr;
}

bool read_ranks(const TorchCall &arguments, PackedBatch *batch) {
  if (!PyLong_CheckExact(arguments.cp_size.ptr()) || !PyLong_CheckExact(arguments.cp_rank.ptr())) {
    return false;
  }
  int overflow = 0;
  const int64_t size = PyLong_AsLongLongAndOverflow(arguments.cp_size.ptr(), &overflow);
  if (overflow != 0 || size < 1 || size > INT32_MAX) return false;
  const int64_t rank = PyLong_AsLongLongAndOverflow(arguments.cp_rank.ptr(), &overflow);
  if (overflow != 0 || rank < 0 || rank >= size) return false;
  batch->cp_size = static_cast<int32_t>(size);
  batch->cp_rank = static_cast<int32_t>(rank);
  return true;
}

// Fills in the parameters, all but the output, and the device; false if the call is not plain.
bool read_call(const TorchCall &arguments, ThdRopeParams *params, int64_t *device) {
  const Torch &names = torch();
  std::array<int64_t, 3> shape, strides;
  if (!is_tensor(arguments.t) || !get(arguments.t, names.s_layout).is(names.strided) ||
      !read_ints(get(arguments.t, names.s_shape), &shape)) {
    return false;
  }
  const nb::object dtype = get(arguments.t, names.s_dtype);
  int code = 0;
  while (code < 3 && !dtype.is(names.dtypes[code])) ++code;
  if (code == 3) return false;
  *device = device_of(arguments.t);
  if (!is_true(get(arguments.t, *device >= 0 ? names.s_is_cuda : names.s_is_cpu)) ||
      is_true(call(arguments.t, names.s_is_neg)) || !PyBool_Check(arguments.interleaved.ptr())) {
    return false;
  }

  std::array<int64_t, 4> table;
  const nb::handle freqs = arguments.freqs;
  if (!is_tensor(freqs) || !get(freqs, names.s_dtype).is(names.dtypes[0]) ||
      !read_ints(get(freqs, names.s_shape), &table) || table[1] != 1 || table[2] != 1 ||
      table[3] % 2 != 0 || table[3] > shape[2] || !is_on(freqs, *device) ||
      !is_true(call(freqs, names.s_is_contiguous)) || is_true(call(freqs, names.s_is_neg))) {
    return false;
  }

  PackedBatch *batch = &params->batch;
  int64_t entries = 0, starts = 0;
  if (!read_metadata(arguments.cu_seqlens, *device, 1, &batch->cu_seqlens, &entries)) return false;
  if (!arguments.start_positions.is_none() &&
      !read_metadata(arguments.start_positions, *device, entries - 1, &batch->start_positions,
                     &starts)) {
    return false;
  }
  batch->num_sequences = entries - 1;
  batch->table_rows = table[0];
  if (!read_ranks(arguments, batch)) return false;

  if (shape[1] > kMaxRowExtent || shape[2] > kMaxRowExtent) {
    throw std::invalid_argument("h is " + std::to_string(shape[1]) + " and d is " +
                                std::to_string(shape[2]) + "; each must be at most " +
                                std::to_string(kMaxRowExtent));
  }
  read_ints(call(arguments.t, names.s_stride), &strides);
  params->input = reinterpret_cast<const void *>(address_of(arguments.t));
  params->freqs = reinterpret_cast<const float *>(address_of(freqs));
  params->num_tokens = shape[0];
  params->num_heads = static_cast<int32_t>(shape[1]);
  params->head_dim = static_cast<int32_t>(shape[2]);
  params->rotary_dim = static_cast<int32_t>(table[3]);
  params->stride_t = strides[0];
  params->stride_h = strides[1];
  params->stride_d = strides[2];
  params->dtype = static_cast<DataType>(code);
  params->interleaved = arguments.interleaved.is(nb::handle(Py_True));
  params->transpose = arguments.transpose;
  // Elements without memory: a fake tensor, or a wrapper around others.
  const bool has_table = table[0] > 0 && table[3] > 0;
  return (!has_elements(*params) || params->input != nullptr) &&
         (!has_table || params->freqs != nullptr);
}

Target read_target(int64_t device) {
  if (device < 0) {
    const nb::object threads = call(torch().module, torch().s_get_num_threads);
    return {-1, 0, static_cast<int>(to_int(threads))};
  }
  const nb::object index = steal_checked(PyLong_FromLongLong(device));
  const bool raw = !torch().raw_stream.is_none();
  const nb::object &function = raw ? torch().raw_stream : torch().current_stream;
  nb::object stream = steal_checked(PyObject_CallOneArg(function.ptr(), index.ptr()));
  if (!raw) stream = get(stream, torch().s_cuda_stream);
  return {static_cast<int>(device), to_address(stream), 0};
}

nb::object empty_like(nb::handle t) {
  const nb::object function = get(torch().module, torch().s_empty_like);
  PyObject *const arguments[] = {t.ptr(), torch().contiguous_format.ptr()};
  return steal_checked(
      PyObject_Vectorcall(function.ptr(), arguments, 1, torch().empty_like_names.ptr()));
}

nb::object rotate_plain_on(const TorchCall &arguments, PathRequest request) {
  ThdRopeParams params{};
  int64_t device = -1;
  try {
    if (!read_call(arguments, &params, &device)) return nb::none();
  } catch (const nb::python_error &) {  // sparse, nested, ...: checks.py has better words
    if (arguments.prepared) throw;
    return nb::none();
  }
  nb::object output = empty_like(arguments.t);
  params.output = reinterpret_cast<void *>(address_of(output));
  run_call(params, request, read_target(device), arguments.routed);
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

nb::object pass_through(const Routed &routed, PyObject *const *arguments, Py_ssize_t number,
                        PyObject *names) {
  counters().passed_through.fetch_add(1, std::memory_order_relaxed);
  return steal_checked(PyObject_Vectorcall(routed.original.ptr(), arguments, number, names));
}

bool is_thd(const Routed &routed, PyObject *format) {
  if (format == routed.thd_format.ptr()) return true;  // as TransformerEngine passes it
  const int equal = PyObject_RichCompareBool(format, routed.thd_format.ptr(), Py_EQ);
  if (equal < 0) nb::raise_python_error();
  return equal != 0;
}

nb::object route(const Routed &routed, PyObject *const *a, Py_ssize_t number, PyObject *names) {
  const bool covered = number == kNumArguments && names == nullptr &&
                       routed.active_switch->active && is_thd(routed, a[kFormatArgument]);
  if (!covered) return pass_through(routed, a, number, names);
  const PathRequest request = request_from_environment();
  if (request == PathRequest::kLegacyGrid) return pass_through(routed, a, number, names);
  const TorchCall arguments{a[0], a[1], a[2], a[4], a[5], a[6], a[7], routed.transpose,
                            true, false};
  try {
    nb::object output = rotate_plain_on(arguments, request);
    if (!output.is_none()) return output;
  } catch (const UnsupportedDevice &error) {
    routed.give_up(error.what());
    return pass_through(routed, a, number, names);
  }
  return steal_checked(PyObject_Vectorcall(routed.prepare.ptr(), a, number, nullptr));
}

// The entry from Python: exceptions stop here and become Python's.
PyObject *call_routed(PyObject *self, PyObject *const *arguments, Py_ssize_t number,
                      PyObject *names) {
  const auto *routed = static_cast<const Routed *>(PyCapsule_GetPointer(self, nullptr));
  try {
    return route(*routed, arguments, number, names).release().ptr();
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
  const nb::object self = steal_checked(PyCapsule_New(routed, nullptr, nullptr));
  return steal_checked(PyCFunction_New(&routed->definition, self.ptr()));
}

}  // namespace thd_rope
}  // namespace transformer_engine
