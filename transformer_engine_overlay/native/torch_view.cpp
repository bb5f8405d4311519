// SPDX-License-Identifier: Apache-2.0

#include "torch_view.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "printable.h"

namespace nb = nanobind;

namespace transformer_engine {
namespace thd_rope {
namespace {

// DLPack's stable binary interface, the part of it that is used: a tensor that its owner shows, and
// the table of functions that a tensor type offers (DLPack 1.3).
struct DlTensor {
  void *data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
};

struct DlExchange {
  uint32_t major, minor;
  void *older;
  void *allocate;
  void *managed_from_object;
  void *managed_to_object;
  int (*view_object)(void *object, DlTensor *view);  // optional
  int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
};

constexpr int32_t kDlCpu = 1, kDlCuda = 2;
constexpr uint8_t kDlInt = 0, kDlFloat = 2, kDlBFloat = 4;

// What is looked up in torch once. Never freed: it outlives the interpreter's own clean-up.
struct Torch {
  nb::object module = nb::module_::import_("torch");
  nb::object tensor_type = module.attr("Tensor");
  nb::object parameter_type = module.attr("nn").attr("Parameter");
  nb::object contiguous_format = module.attr("contiguous_format");
  // by ViewType
  nb::object dtypes[4] = {module.attr("float32"), module.attr("float16"), module.attr("bfloat16"),
                          module.attr("int32")};
  // The raw handle of the stream, where this torch has it, without a Python object around it.
  nb::object raw_stream = nb::getattr(module.attr("_C"), "_cuda_getCurrentRawStream", nb::none());
  nb::object current_stream = module.attr("cuda").attr("current_stream");
  nb::str dtype = intern("dtype"), shape = intern("shape"), stride = intern("stride"),
          get_device = intern("get_device"), data_ptr = intern("data_ptr"),
          is_cuda = intern("is_cuda"), is_cpu = intern("is_cpu"), is_neg = intern("is_neg"),
          empty_like = intern("empty_like"), cuda_stream = intern("cuda_stream"),
          get_num_threads = intern("get_num_threads"), storage_offset = intern("storage_offset");
  nb::tuple empty_like_names = nb::make_tuple(intern("memory_format"));
  const DlExchange *exchange = find_exchange(tensor_type);

  static nb::str intern(const char *text) {
    return nb::steal<nb::str>(PyUnicode_InternFromString(text));
  }

  static const DlExchange *find_exchange(const nb::object &tensor_type) {
    // To compare the two ways, and to do without the first should a torch have a fault in it.
    const char *const wanted = std::getenv("TE_OVERLAY_DLPACK");
    const std::string value = wanted == nullptr ? "1" : wanted;
    if (value != "0" && value != "1") {
      throw std::invalid_argument("TE_OVERLAY_DLPACK is '" + printable(value) +
                                  "'; it must be 1, 0 or unset");
    }
    if (value == "0") return nullptr;
    const nb::object capsule = nb::getattr(tensor_type, "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
    const auto *table =
        static_cast<const DlExchange *>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    const bool usable = table->major == 1 && table->view_object != nullptr;
    return usable && table->current_stream != nullptr ? table : nullptr;
  }
};

// No static local: while its guard is held Python may switch to a thread that waits for the guard,
// with the GIL. Of two threads that come first together one leaves its copy behind.
const Torch &torch() {
  static std::atomic<const Torch *> instance{nullptr};
  const Torch *first = instance.load(std::memory_order_acquire);
  if (first != nullptr) return *first;
  const Torch *const made = new Torch();
  return instance.compare_exchange_strong(first, made) ? *made : *first;
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

ViewType view_type(uint8_t code, uint8_t bits, uint16_t lanes) {
  if (lanes != 1) return ViewType::kOther;
  if (code == kDlFloat && bits == 32) return ViewType::kFloat32;
  if (code == kDlFloat && bits == 16) return ViewType::kFloat16;
  if (code == kDlBFloat && bits == 16) return ViewType::kBFloat16;
  if (code == kDlInt && bits == 32) return ViewType::kInt32;
  return ViewType::kOther;
}

bool view_by_exchange(nb::handle tensor, TensorView *view) {
  DlTensor shown;
  if (torch().exchange->view_object(tensor.ptr(), &shown) != 0) nb::raise_python_error();
  if (shown.ndim > kMaxViewDims) return false;
  view->ndim = shown.ndim;
  for (int i = 0; i < shown.ndim; ++i) {
    view->shape[i] = shown.shape[i];
    view->strides[i] = shown.strides[i];
  }
  view->dtype = view_type(shown.type_code, shown.type_bits, shown.type_lanes);
  view->device = shown.device_type == kDlCuda  ? shown.device_id
                 : shown.device_type == kDlCpu ? kCpuDevice
                                               : kOtherDevice;
  view->data = static_cast<char *>(shown.data) + shown.byte_offset;
  if (shown.data == nullptr) view->data = nullptr;
  return true;
}

int64_t tuple_item(const nb::object &tuple, int i) {
  return to_int(PyTuple_GET_ITEM(tuple.ptr(), i));
}

bool view_by_attributes(nb::handle tensor, TensorView *view) {
  const Torch &names = torch();
  const nb::object shape = get(tensor, names.shape), strides = call(tensor, names.stride);
  if (!PyTuple_Check(shape.ptr()) || !PyTuple_Check(strides.ptr())) return false;
  const Py_ssize_t ndim = PyTuple_GET_SIZE(shape.ptr());
  if (ndim > kMaxViewDims || PyTuple_GET_SIZE(strides.ptr()) != ndim) return false;
  view->ndim = static_cast<int32_t>(ndim);
  for (int i = 0; i < view->ndim; ++i) {
    view->shape[i] = tuple_item(shape, i);
    view->strides[i] = tuple_item(strides, i);
  }
  const nb::object dtype = get(tensor, names.dtype);
  int code = 0;
  while (code < 4 && !dtype.is(names.dtypes[code])) ++code;
  view->dtype = static_cast<ViewType>(code);
  view->device = kOtherDevice;
  if (is_true(get(tensor, names.is_cuda))) {
    view->device = static_cast<int32_t>(to_int(call(tensor, names.get_device)));
  } else if (is_true(get(tensor, names.is_cpu))) {
    view->device = kCpuDevice;
  }
  view->data = reinterpret_cast<void *>(to_address(call(tensor, names.data_ptr)));
  return true;
}

// A slice of a tensor without memory (zeros of autograd, a storage that was freed) shows its offset
// as an address. No memory that torch allocates lies so low but a small heap on the CPU, so that
// hardly a call pays for the question.
constexpr uintptr_t kLowAddress = uintptr_t{1} << 40;

void forget_offset_into_nothing(nb::handle tensor, TensorView *view) {
  const auto address = reinterpret_cast<uintptr_t>(view->data);
  if (address == 0 || address >= kLowAddress || view->dtype == ViewType::kOther) return;
  const bool is_wide = view->dtype == ViewType::kFloat32 || view->dtype == ViewType::kInt32;
  const uintptr_t offset = to_address(call(tensor, torch().storage_offset));
  if (address == offset * (is_wide ? 4 : 2)) view->data = nullptr;
}

}  // namespace

int64_t TensorView::numel() const {
  int64_t product = 1;
  for (int i = 0; i < ndim; ++i) product *= shape[i];
  return product;
}

bool TensorView::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t expected = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

bool view_tensor(nb::handle object, TensorView *view) {
  const auto *tensor_type = reinterpret_cast<PyTypeObject *>(torch().tensor_type.ptr());
  if (!PyObject_TypeCheck(object.ptr(), const_cast<PyTypeObject *>(tensor_type))) return false;
  const bool is_shown = torch().exchange != nullptr ? view_by_exchange(object, view)
                                                    : view_by_attributes(object, view);
  if (is_shown) forget_offset_into_nothing(object, view);
  return is_shown;
}

bool is_plain_type(nb::handle tensor) {
  const nb::handle type = tensor.type();
  return type.is(torch().tensor_type) || type.is(torch().parameter_type);
}

bool is_negated(nb::handle tensor) { return is_true(call(tensor, torch().is_neg)); }

uintptr_t current_stream(int32_t device) {
  if (torch().exchange != nullptr) {
    void *stream = nullptr;
    if (torch().exchange->current_stream(kDlCuda, device, &stream) != 0) nb::raise_python_error();
    return reinterpret_cast<uintptr_t>(stream);
  }
  const nb::object index = steal_checked(PyLong_FromLong(device));
  const bool raw = !torch().raw_stream.is_none();
  const nb::object &function = raw ? torch().raw_stream : torch().current_stream;
  const nb::object stream = steal_checked(PyObject_CallOneArg(function.ptr(), index.ptr()));
  return to_address(raw ? stream : get(stream, torch().cuda_stream));
}

nb::object empty_like(nb::handle t, const TensorView &like, TensorView *view) {
  const nb::object function = get(torch().module, torch().empty_like);
  const auto make = [&](bool by_name) {
    PyObject *const arguments[] = {t.ptr(), torch().contiguous_format.ptr()};
    PyObject *const names = by_name ? torch().empty_like_names.ptr() : nullptr;
    nb::object output = steal_checked(PyObject_Vectorcall(function.ptr(), arguments, 1, names));
    try {
      if (!view_tensor(output, view)) view->ndim = -1;
    } catch (const nb::python_error &) {  // a meta tensor, for one
      view->ndim = -1;
    }
    return output;
  };
  // The likeness of a tensor whose dimensions lie in order is contiguous nearly always, and asking
  // for that by name costs time.
  const bool in_order = like.strides[0] >= like.strides[1] && like.strides[1] >= like.strides[2];
  nb::object output = make(!in_order);
  if (in_order && view->ndim >= 0 && !view->is_contiguous()) output = make(true);
  if (view->ndim != like.ndim || view->dtype != like.dtype || view->device != like.device ||
      !std::equal(like.shape, like.shape + like.ndim, view->shape) || !view->is_contiguous() ||
      !view->has_memory()) {
    throw std::runtime_error(
        "torch.empty_like gave no plain tensor like its input; a torch mode (fake tensors, "
        "tracing) "
        "or a patch of torch is in the way");
  }
  return output;
}

int num_cpu_threads() {
  return static_cast<int>(to_int(call(torch().module, torch().get_num_threads)));
}

}  // namespace thd_rope
}  // namespace transformer_engine
