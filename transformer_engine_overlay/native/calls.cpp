// SPDX-License-Identifier: Apache-2.0

#include "calls.h"

#include <nanobind/nanobind.h>

#include <cstdlib>
#include <stdexcept>

#include "faults.h"
#include "fused_rope/thd_plan.h"
#include "printable.h"

namespace transformer_engine {
namespace thd_rope {

Counters &counters() {
  static Counters instance;
  return instance;
}

PathRequest checked_request(const std::optional<std::string> &value) {
  const PathRequest request = parse_path_request(value ? value->c_str() : nullptr);
  if (request == PathRequest::kInvalid) {
    throw std::invalid_argument(
        std::string(kPathVariable) + " is '" + printable(*value) +
        "'; it must be 1 (token-linear), 0 (legacy grid) or unset (automatic)");
  }
  return request;
}

PathRequest request_from_environment() {
  const PathRequest request = path_request_from_environment();
  if (request != PathRequest::kInvalid) return request;
  return checked_request(std::getenv(kPathVariable));
}

void report_fault_of(int device) {
  Fault fault;
  if (!take_fault(device, &fault)) return;
  nanobind::module_::import_("transformer_engine_overlay.faults")
      .attr("report")(device, fault.kind, fault.sequence, fault.value, fault.limit, fault.cp_size,
                      fault.cp_rank);
}

void report_faults() {
  for (int device = -1; device < kMaxDevices; ++device) report_fault_of(device);
}

void run_call(const ThdRopeParams &params, PathRequest request, const Target &target, bool routed) {
  const Path path = choose_path(request);
  if (target.device >= 0) report_fault_of(target.device);  // of calls before this one
  int64_t blocks = 0;
  {
    const nanobind::gil_scoped_release release;
    blocks = target.device < 0 ? run_on_cpu(params, path, target.num_threads)
                               : run_on_cuda(params, path, target.device, target.stream);
  }
  if (target.device < 0) report_fault_of(target.device);  // the CPU is done
  if (blocks == 0) return;
  PathCounter &counter = counters().paths[static_cast<int>(path)];
  counter.calls.fetch_add(1, std::memory_order_relaxed);
  counter.blocks.fetch_add(blocks, std::memory_order_relaxed);
  if (path == Path::kTokenLinear && target.device >= 0) {
    const int body = static_cast<int>(choose_body(params));
    counters().bodies[body].fetch_add(1, std::memory_order_relaxed);
  }
  if (routed) counter.routed.fetch_add(1, std::memory_order_relaxed);
}

void run_fused_call(const FusedQkvParams &params, int device, uintptr_t stream) {
  report_fault_of(device);  // of calls before this one
  int64_t blocks = 0;
  {
    const nanobind::gil_scoped_release release;
    blocks = run_fused_on_cuda(params, device, stream);
  }
  PathCounter &counter = counters().paths[static_cast<int>(Path::kTokenLinear)];
  counter.calls.fetch_add(1, std::memory_order_relaxed);
  counter.blocks.fetch_add(blocks, std::memory_order_relaxed);
  counters().fused.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace thd_rope
}  // namespace transformer_engine
