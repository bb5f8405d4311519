// SPDX-License-Identifier: Apache-2.0

#include "torch_fused_call.h"

#include <algorithm>

#include "calls.h"
#include "torch_arguments.h"
#include "torch_view.h"

namespace nb = nanobind;

namespace transformer_engine {
namespace thd_rope {
namespace {

// Views [t, groups, heads, dim] of plain tensors, the last dimension contiguous. The device and
// dtype of the first part that is read are those that the others must have.
class PartReader {
 public:
  bool read(nb::handle input, nb::handle output, QkvPart *part, int32_t *dim) {
    TensorView from, to;
    if (!view(input, &from) || !view(output, &to) || is_negated(input) ||
        !std::equal(from.shape, from.shape + 4, to.shape)) {
      return false;
    }
    HeadStrides in, out;
    if (!read_strides(from, &in) || !read_strides(to, &out)) return false;
    *dim = static_cast<int32_t>(from.shape[3]);
    if (*dim == 0) return true;  // absent
    *part = {from.data,
             to.data,
             in,
             out,
             static_cast<int32_t>(from.shape[1]),
             static_cast<int32_t>(from.shape[2])};
    return true;
  }

  int32_t device() const { return device_; }
  int64_t num_tokens() const { return num_tokens_; }
  ViewType dtype() const { return dtype_; }

 private:
  bool view(nb::handle tensor, TensorView *view) {
    if (!view_tensor(tensor, view) || !is_plain_type(tensor) || view->ndim != 4 ||
        view->dtype > ViewType::kBFloat16 || view->device < 0 || !view->has_memory()) {
      return false;
    }
    if (device_ < 0) {
      device_ = view->device;
      dtype_ = view->dtype;
      num_tokens_ = view->shape[0];
    }
    return view->device == device_ && view->dtype == dtype_ && view->shape[0] == num_tokens_ &&
           (view->strides[3] == 1 || view->shape[3] <= 1);
  }

  // False if a token's row spans too much. A dimension of one entry may have any stride, which
  // nobody uses.
  static bool read_strides(const TensorView &view, HeadStrides *strides) {
    const auto stride = [&](int i) { return view.shape[i] > 1 ? view.strides[i] : 0; };
    int64_t span = 1;
    for (int i = 1; i < 4; ++i) {
      if (view.shape[i] > kMaxRowExtent || stride(i) > INT32_MAX) return false;
      span += (view.shape[i] - 1) * stride(i);
    }
    const int64_t heads = view.shape[1] * view.shape[2];
    *strides = {stride(0), static_cast<int32_t>(stride(1)), static_cast<int32_t>(stride(2))};
    return span <= INT32_MAX && heads <= kMaxRowExtent && heads * stride(2) <= INT32_MAX;
  }

  int32_t device_ = kOtherDevice;
  ViewType dtype_ = ViewType::kOther;
  int64_t num_tokens_ = 0;
};

bool read_call(const TorchFusedCall &call, FusedQkvParams *params, int32_t *device) {
  PartReader reader;
  int32_t key_dim = 0;
  if (!reader.read(call.query, call.query_output, &params->query, &params->head_dim) ||
      !reader.read(call.key, call.key_output, &params->key, &key_dim) ||
      key_dim != params->head_dim) {
    return false;
  }
  if (!call.value.is_none() &&
      !reader.read(call.value, call.value_output, &params->value, &params->value_dim)) {
    return false;
  }
  AngleTable query, key;
  if (!read_table(call.query_freqs, reader.device(), params->head_dim, &query) ||
      !read_table(call.key_freqs, reader.device(), params->head_dim, &key) ||
      query.rows != key.rows || query.rotary_dim != key.rotary_dim ||
      !read_batch(call.cu_seqlens, call.start_positions, reader.device(), &params->batch) ||
      !read_ranks(call.cp_size, call.cp_rank, &params->batch)) {
    return false;
  }
  params->query_freqs = query.freqs;
  params->key_freqs = key.freqs;
  params->rotary_dim = query.rotary_dim;
  params->batch.table_rows = query.rows;
  params->num_tokens = reader.num_tokens();
  params->dtype = static_cast<DataType>(reader.dtype());
  params->interleaved = call.interleaved;
  params->transpose = call.transpose;
  *device = reader.device();
  return true;
}

// With nothing to rotate, or no sequence or table row, the plain calls know what to do.
bool has_work(const FusedQkvParams &params) {
  return params.num_tokens > 0 && num_heads(params.query) > 0 && num_heads(params.key) > 0 &&
         params.batch.num_sequences > 0 && params.batch.table_rows > 0;
}

}  // namespace

bool rotate_fused(const TorchFusedCall &call) {
  if (choose_path(request_from_environment()) != Path::kTokenLinear) return false;
  FusedQkvParams params{};
  int32_t device = kOtherDevice;
  try {
    if (!read_call(call, &params, &device)) return false;
  } catch (const nb::python_error &) {  // sparse, nested, ...: checks.py has better words
    return false;
  }
  if (!has_work(params) || !fits_fused_kernels(params)) return false;
  run_fused_call(params, device, current_stream(device));
  return true;
}

}  // namespace thd_rope
}  // namespace transformer_engine
