// SPDX-License-Identifier: Apache-2.0
//
// The Python module. It only exports.

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <array>
#include <optional>
#include <string>
#include <utility>

#include "backend.h"
#include "calls.h"
#include "faults.h"
#include "fused_rope/thd_plan.h"
#include "torch_call.h"
#include "torch_fused_call.h"

namespace nb = nanobind;

namespace transformer_engine {
namespace thd_rope {
namespace {

nb::object rotate(nb::handle t, nb::handle freqs, nb::handle start_positions,
                  nb::handle interleaved, nb::handle cu_seqlens, nb::handle cp_size,
                  nb::handle cp_rank, bool transpose, bool routed, bool prepared) {
  return rotate_plain({t, freqs, start_positions, interleaved, cu_seqlens, cp_size, cp_rank,
                       transpose, routed, prepared});
}

bool rotate_fused_parts(nb::handle query, nb::handle query_output, nb::handle key,
                        nb::handle key_output, nb::handle value, nb::handle value_output,
                        nb::handle query_freqs, nb::handle key_freqs, nb::handle start_positions,
                        bool interleaved, nb::handle cu_seqlens, nb::handle cp_size,
                        nb::handle cp_rank, bool transpose) {
  return rotate_fused({query, query_output, key, key_output, value, value_output, query_freqs,
                       key_freqs, start_positions, cu_seqlens, cp_size, cp_rank, interleaved,
                       transpose});
}

nb::dict path_counts() {
  nb::dict counts;
  const char *const names[] = {"legacy_grid", "token_linear"};
  for (int path = 0; path < 2; ++path) {
    const PathCounter &counter = counters().paths[path];
    nb::dict count;
    count["calls"] = counter.calls.load(std::memory_order_relaxed);
    count["blocks"] = counter.blocks.load(std::memory_order_relaxed);
    count["routed"] = counter.routed.load(std::memory_order_relaxed);
    counts[names[path]] = count;
  }
  return counts;
}

// Token-linear calls on a GPU by the body that ran, for tests that force one.
nb::dict body_counts() {
  nb::dict counts;
  const char *const names[] = {"scalar", "narrow2", "narrow4", "wide32", "wide64"};
  for (int body = 0; body < 5; ++body) {
    counts[names[body]] = counters().bodies[body].load(std::memory_order_relaxed);
  }
  return counts;
}

// The body alone, for its table of tests. Addresses are only looked at for their alignment.
int choose_body_for(int dtype, bool interleaved, int32_t num_heads, int32_t head_dim,
                    int32_t rotary_dim, const std::array<int64_t, 3> &strides,
                    const std::array<uintptr_t, 3> &addresses) {
  ThdRopeParams params{};
  params.input = reinterpret_cast<const void *>(addresses[0]);
  params.output = reinterpret_cast<void *>(addresses[1]);
  params.freqs = reinterpret_cast<const float *>(addresses[2]);
  params.stride_t = strides[0];
  params.stride_h = strides[1];
  params.stride_d = strides[2];
  params.num_heads = num_heads;
  params.head_dim = head_dim;
  params.rotary_dim = rotary_dim;
  params.dtype = static_cast<DataType>(dtype);
  params.interleaved = interleaved;
  return static_cast<int>(choose_body(params));
}

// The body for a fused call of contiguous parts, or -1 where the fused kernels do not take it.
int choose_fused_body_for(int dtype, bool interleaved, int32_t query_heads, int32_t key_heads,
                          int32_t head_dim, int32_t rotary_dim, int32_t value_dim) {
  FusedQkvParams params{};
  params.query = {nullptr, nullptr, {0, 0, head_dim}, {0, 0, head_dim}, 1, query_heads};
  params.key = {nullptr, nullptr, {0, 0, head_dim}, {0, 0, head_dim}, 1, key_heads};
  params.value = {nullptr, nullptr, {0, value_dim, 0}, {0, value_dim, 0}, key_heads, 1};
  params.head_dim = head_dim;
  params.rotary_dim = rotary_dim;
  params.value_dim = value_dim;
  params.dtype = static_cast<DataType>(dtype);
  params.interleaved = interleaved;
  return fits_fused_kernels(params) ? static_cast<int>(choose_fused_body(params)) : -1;
}

// Owner and table row of each local token, written to int64 arrays on the host. `warp_wide`
// searches as a warp does, its lanes one after the other.
void locate_tokens(uintptr_t cu_seqlens, uintptr_t start_positions, int32_t num_sequences,
                   int64_t table_rows, int32_t cp_size, int32_t cp_rank, int64_t num_tokens,
                   bool warp_wide, uintptr_t sequences, uintptr_t rows) {
  const PackedBatch batch{reinterpret_cast<const int32_t *>(cu_seqlens),
                          reinterpret_cast<const int32_t *>(start_positions),
                          table_rows,
                          num_sequences,
                          cp_size,
                          cp_rank};
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t sequence =
        warp_wide ? find_sequence<32>(batch, token) : find_sequence(batch, token);
    reinterpret_cast<int64_t *>(sequences)[token] = sequence;
    reinterpret_cast<int64_t *>(rows)[token] = table_row(batch, token, sequence).index;
  }
}

}  // namespace

const char *built_chips() { return TE_OVERLAY_CUDA_ARCHS_BUILT; }

std::string driver_complaint(const CudaVersions &versions) {
  const auto text = [](int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  if (versions.driver == 0) {
    return "no NVIDIA driver was found, and the tensors are on a CUDA device; "
           "transformer-engine-overlay was built with the CUDA " +
           text(versions.runtime) + " runtime";
  }
  // Within one major version an older driver runs a newer runtime.
  if (versions.driver / 1000 >= versions.runtime / 1000) return "";
  return "the NVIDIA driver supports CUDA up to " + text(versions.driver) +
         ", but transformer-engine-overlay was built with the CUDA " + text(versions.runtime) +
         " runtime; update the driver, or reinstall the package from source with CUDA_HOME set to "
         "a CUDA " +
         std::to_string(versions.driver / 1000) + " toolkit";
}

#if !TE_OVERLAY_WITH_CUDA
CudaVersions cuda_versions() { return {0, 0}; }

void reset_faults(int device) {
  FaultRecord *record = device_faults(device)->record.load();
  if (record == nullptr) return;
  record->valid = 0;
  device_faults(device)->reported.store(false);
}

[[noreturn]] static void throw_no_cuda() {
  throw UnsupportedDevice(
      "transformer-engine-overlay was built without CUDA, and the tensors are on a CUDA device; "
      "reinstall it from source without TE_OVERLAY_CUDA=0");
}

int64_t run_on_cuda(const ThdRopeParams &, Path, int, uintptr_t) { throw_no_cuda(); }

int64_t run_fused_on_cuda(const FusedQkvParams &, int, uintptr_t) { throw_no_cuda(); }
#endif

}  // namespace thd_rope
}  // namespace transformer_engine

NB_MODULE(_native, m) {
  using namespace transformer_engine::thd_rope;  // NOLINT: the module's own namespace
  // Routed functions, and what they hold, live as long as the process: anybody may keep one.
  nb::set_leak_warnings(false);
  nb::exception<UnsupportedDevice>(m, "UnsupportedDeviceError", PyExc_RuntimeError);
  nb::class_<RouterSwitch>(m, "RouterSwitch")
      .def(nb::init<>())
      .def_rw("active", &RouterSwitch::active);
  m.def("rotate", &rotate, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
        nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg());
  m.def("rotate_fused", &rotate_fused_parts, nb::arg().none(), nb::arg().none(), nb::arg().none(),
        nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
        nb::arg().none(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
        nb::arg());
  m.def("make_routed", &make_routed);
  m.def("path_counts", &path_counts);
  m.def("passed_through", [] { return counters().passed_through.load(std::memory_order_relaxed); });
  m.def("count_passed_through",
        [] { counters().passed_through.fetch_add(1, std::memory_order_relaxed); });
  m.def("path_request", [] { return static_cast<int>(request_from_environment()); });
  m.def("report_faults", &report_faults);
  m.def("reset_faults", &reset_faults);
  m.def("body_counts", &body_counts);
  m.def("fused_calls", [] { return counters().fused.load(std::memory_order_relaxed); });
  m.def("choose_body", &choose_body_for, nb::arg("dtype"), nb::arg("interleaved"),
        nb::arg("num_heads"), nb::arg("head_dim"), nb::arg("rotary_dim"), nb::arg("strides"),
        nb::arg("addresses"));
  m.def("choose_fused_body", &choose_fused_body_for);
  m.def("locate_tokens", &locate_tokens);
  m.def("cuda_versions", [] {
    const CudaVersions versions = cuda_versions();
    return std::make_pair(versions.driver, versions.runtime);
  });
  m.def("driver_complaint",
        [](int driver, int runtime) { return driver_complaint({driver, runtime}); });
  m.attr("LEGACY_GRID") = static_cast<int>(Path::kLegacyGrid);
  m.attr("TOKEN_LINEAR") = static_cast<int>(Path::kTokenLinear);
  m.attr("AUTOMATIC") = static_cast<int>(PathRequest::kAutomatic);
  m.attr("MAX_ROW_EXTENT") = kMaxRowExtent;
  m.attr("MAX_SEQUENCES") = kMaxSequences;
  m.attr("WITH_CUDA") = static_cast<bool>(TE_OVERLAY_WITH_CUDA);
  m.attr("CUDA_ARCHS") = built_chips();
}
