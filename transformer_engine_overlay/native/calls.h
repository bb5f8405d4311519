// SPDX-License-Identifier: Apache-2.0
//
// A call once its arguments are numbers and addresses: path, backend, counters.

#ifndef TRANSFORMER_ENGINE_OVERLAY_NATIVE_CALLS_H_
#define TRANSFORMER_ENGINE_OVERLAY_NATIVE_CALLS_H_

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "backend.h"

namespace transformer_engine {
namespace thd_rope {

// Index arithmetic inside of a row is 32-bit; between rows and heads it is 64-bit. The limit of h,
// d.
constexpr int64_t kMaxRowExtent = 1 << 24;

// What ran, for tests and status reports; both backends together.
struct PathCounter {
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> blocks{0};
  std::atomic<int64_t> routed{0};  // calls that TransformerEngine made
};

struct Counters {
  PathCounter paths[2];                    // by Path
  std::atomic<int64_t> bodies[5]{};        // token-linear calls on a GPU, by Body
  std::atomic<int64_t> fused{0};           // those that rotated query and key together
  std::atomic<int64_t> passed_through{0};  // calls that went on to TransformerEngine's function
};
Counters &counters();

// Where a call runs. `device` is a CUDA device index, or -1 for host memory.
struct Target {
  int device;
  uintptr_t stream;
  int num_threads;
};

// Throws std::invalid_argument, naming the variable, for a value that asks for nothing.
PathRequest checked_request(const std::optional<std::string> &value);
PathRequest request_from_environment();

// Tells Python of the fault that a device met, once, if there is one by now; what Python raises is
// thrown. -1 is the CPU backend.
void report_fault_of(int device);

// The same for all devices, at the end of the process.
void report_faults();

// Runs a call on the path that `request` and its shape lead to. Needs the GIL, and releases it.
void run_call(const ThdRopeParams &params, PathRequest request, const Target &target, bool routed);

// Runs a fused call on a GPU. Needs the GIL, and releases it.
void run_fused_call(const FusedQkvParams &params, int device, uintptr_t stream);

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_NATIVE_CALLS_H_
