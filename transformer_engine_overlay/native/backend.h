// SPDX-License-Identifier: Apache-2.0
//
// What the binding needs of the two backends.

#ifndef TRANSFORMER_ENGINE_OVERLAY_NATIVE_BACKEND_H_
#define TRANSFORMER_ENGINE_OVERLAY_NATIVE_BACKEND_H_

#include <cstdint>
#include <stdexcept>
#include <string>

#include "fused_qkv.h"
#include "fused_rope/thd_params.h"

namespace transformer_engine {
namespace thd_rope {

// This build cannot run on that device or driver, whatever the call.
class UnsupportedDevice : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Runs a call on host memory with at most `num_threads` threads. Returns the number of blocks: the
// pairs of table row and sequence that were visited, or the tokens.
int64_t run_on_cpu(const ThdRopeParams &params, Path path, int num_threads);

// Queues a call on `stream` of device `device`; the calling thread's current device is what it was
// afterwards. Returns the number of blocks launched. Throws std::invalid_argument for a grid that
// is too large, UnsupportedDevice, or std::runtime_error for whatever CUDA reports.
int64_t run_on_cuda(const ThdRopeParams &params, Path path, int device, uintptr_t stream);

// The same for a fused call, which has only the token-linear path. Needs fits_fused_kernels(),
// tokens, sequences and table rows.
int64_t run_fused_on_cuda(const FusedQkvParams &params, int device, uintptr_t stream);

// CUDA versions as CUDA writes them (13000 for 13.0); 0 where there is none.
struct CudaVersions {
  int driver;
  int runtime;
};
CudaVersions cuda_versions();

// Why a driver of this version cannot run this runtime, or an empty string.
std::string driver_complaint(const CudaVersions &versions);

// The chips that the CUDA backend was compiled for, as CMake lists them.
const char *built_chips();

// True if the output has an element.
inline bool has_elements(const ThdRopeParams &params) {
  return params.num_tokens > 0 && params.num_heads > 0 && params.head_dim > 0;
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_NATIVE_BACKEND_H_
