// SPDX-License-Identifier: Apache-2.0
//
// What a call is given and which path it takes. Host code without CUDA or any framework.

#ifndef TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_PARAMS_H_
#define TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_PARAMS_H_

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "thd_fault.h"
#include "thd_token_map.h"

namespace transformer_engine {
namespace thd_rope {

enum class DataType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// One call. Offsets and strides count elements of the input's type.
struct ThdRopeParams {
  const void *input;   // [num_tokens, num_heads, head_dim], any strides
  void *output;        // the same shape, contiguous
  const float *freqs;  // [batch.table_rows, rotary_dim], contiguous, angles in radians
  PackedBatch batch;
  FaultSink faults;
  int64_t num_tokens;  // local rows in the tensor, tail rows included
  int64_t stride_t, stride_h, stride_d;
  int32_t num_heads;
  int32_t head_dim;
  int32_t rotary_dim;  // even, at most head_dim; the rest of a row is copied as raw bits
  DataType dtype;
  bool interleaved;  // pairs (2j, 2j + 1) rather than (j, j + rotary_dim / 2)
  bool transpose;    // the gradient rather than the rotation
};

// The two ways over a packed batch.
enum class Path : int32_t {
  kLegacyGrid = 0,   // one block per table row and sequence
  kTokenLinear = 1,  // work proportional to local tokens
};

// What NVTE_FUSED_ROPE_THD_TOKEN_LINEAR asks for.
enum class PathRequest : int32_t {
  kLegacyGrid = 0,
  kTokenLinear = 1,
  kAutomatic = 2,
  kInvalid = 3
};

constexpr const char *kPathVariable = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR";

// The search for a sequence counts in 32 bits, with room for the ends of 32 parts.
constexpr int64_t kMaxSequences = 1 << 30;

// CUDA's limit for gridDim.x.
constexpr int64_t kMaxGridBlocks = 2147483647;

inline PathRequest parse_path_request(const char *value) {
  if (value == nullptr) return PathRequest::kAutomatic;
  if (std::strcmp(value, "0") == 0) return PathRequest::kLegacyGrid;
  if (std::strcmp(value, "1") == 0) return PathRequest::kTokenLinear;
  return PathRequest::kInvalid;
}

// Read anew at each call, so that a test or a notebook can switch the path.
inline PathRequest path_request_from_environment() {
  return parse_path_request(std::getenv(kPathVariable));
}

// Blocks of the legacy grid. Saturates instead of overflowing: 2^31 rows times 2^31 sequences fit,
// but nothing keeps a caller to that.
inline int64_t legacy_grid_blocks(const PackedBatch &batch) {
  if (batch.table_rows > 0 && batch.num_sequences > INT64_MAX / batch.table_rows) return INT64_MAX;
  return batch.table_rows * batch.num_sequences;
}

// The choice of path, the only place where it is made. Automatic is token-linear, whatever the
// shape: on an H200 it was the faster one, or at most 2% slower, at each named point of `te-overlay
// bench kernel` (ci/results/kernel-te-*.csv), down to 512 tokens. Batches of mostly tail rows
// apart, which the legacy grid of TE leaves unwritten. Expects a valid request.
inline Path choose_path(PathRequest request) {
  return request == PathRequest::kLegacyGrid ? Path::kLegacyGrid : Path::kTokenLinear;
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_PARAMS_H_
