// SPDX-License-Identifier: Apache-2.0
//
// Reads torch tensors without torch's headers: through DLPack's C exchange table where this torch
// has one (2.10 and later; tens of nanoseconds a tensor), else through Python attributes.

#ifndef TRANSFORMER_ENGINE_OVERLAY_NATIVE_TORCH_VIEW_H_
#define TRANSFORMER_ENGINE_OVERLAY_NATIVE_TORCH_VIEW_H_

#include <nanobind/nanobind.h>

#include <cstdint>

namespace transformer_engine {
namespace thd_rope {

// The dtypes that a call can hold; the first three in the order of DataType.
enum class ViewType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt32 = 3, kOther = 4 };

constexpr int32_t kCpuDevice = -1;
constexpr int32_t kOtherDevice = -2;
constexpr int kMaxViewDims = 4;

struct TensorView {
  void *data;
  int32_t ndim;
  int64_t shape[kMaxViewDims];
  int64_t strides[kMaxViewDims];  // in elements
  ViewType dtype;
  int32_t device;  // a CUDA index, kCpuDevice or kOtherDevice

  int64_t numel() const;
  bool is_contiguous() const;
  bool has_memory() const { return numel() == 0 || data != nullptr; }
};

// False if `object` is no tensor or has more than four dimensions. Throws what torch raises for a
// tensor that has no strides or no memory to show.
bool view_tensor(nanobind::handle object, TensorView *view);

// Whether the type is torch.Tensor or Parameter itself. A subclass may answer torch's functions in
// its own way.
bool is_plain_type(nanobind::handle tensor);

// Whether the values are the negated ones of those in memory.
bool is_negated(nanobind::handle tensor);

// torch's current stream of a CUDA device.
uintptr_t current_stream(int32_t device);

// A new contiguous tensor of the shape, dtype and device of `t`, whose view is `like`; its own view
// goes to `view`. Throws if torch, in one of its modes, gives something else.
nanobind::object empty_like(nanobind::handle t, const TensorView &like, TensorView *view);

int num_cpu_threads();

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_NATIVE_TORCH_VIEW_H_
