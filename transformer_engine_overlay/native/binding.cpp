// SPDX-License-Identifier: Apache-2.0
//
// The Python module. It only exports: raw pointers and integers in, so that it depends on no
// version of torch. The Python side has checked every argument (checks.py).

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "backend.h"

namespace nb = nanobind;

namespace transformer_engine {
namespace thd_rope {
namespace {

// What ran, for tests and status reports; both backends together.
struct PathCounter {
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> blocks{0};
  std::atomic<int64_t> routed{0};  // calls that TransformerEngine made
};
PathCounter path_counters[2];
// Calls that TransformerEngine made and that went on to its own function.
std::atomic<int64_t> passed_through{0};

PathRequest checked_request(const std::optional<std::string> &value) {
  const PathRequest request = parse_path_request(value ? value->c_str() : nullptr);
  if (request == PathRequest::kInvalid) {
    throw std::invalid_argument(
        std::string(kPathVariable) + " is '" + *value +
        "'; it must be 1 (token-linear), 0 (legacy grid) or unset (automatic)");
  }
  return request;
}

PathRequest request_from_environment() {
  const PathRequest request = path_request_from_environment();
  if (request != PathRequest::kInvalid) return request;
  return checked_request(std::getenv(kPathVariable));
}

// Index arithmetic inside of a row is 32-bit; between rows and heads it is 64-bit.
constexpr int64_t kMaxRowExtent = 1 << 24;

void check_extents(const ThdRopeParams &params, int64_t num_heads, int64_t head_dim) {
  if (num_heads > kMaxRowExtent || head_dim > kMaxRowExtent) {
    throw std::invalid_argument("h is " + std::to_string(num_heads) + " and d is " +
                                std::to_string(head_dim) + "; each must be at most " +
                                std::to_string(kMaxRowExtent));
  }
  if (has_elements(params) && (params.input == nullptr || params.output == nullptr)) {
    throw std::invalid_argument(
        "the rotated tensor has elements but no memory (a wrapper subclass of torch.Tensor?); pass "
        "a plain tensor");
  }
}

template <typename T>
T *pointer(uintptr_t address) {
  return reinterpret_cast<T *>(address);
}

// One rotation. `device` is a CUDA device index, or -1 for host memory; addresses may be 0 where
// there is nothing to point at. Returns the path taken.
int thd_rope(uintptr_t input, uintptr_t output, uintptr_t freqs, uintptr_t cu_seqlens,
             uintptr_t start_positions, int64_t num_tokens, int64_t num_heads, int64_t head_dim,
             int64_t rotary_dim, int64_t stride_t, int64_t stride_h, int64_t stride_d,
             int64_t num_sequences, int64_t table_rows, int32_t cp_size, int32_t cp_rank,
             int32_t dtype, bool interleaved, bool transpose, int device, uintptr_t stream,
             int num_threads, bool routed) {
  ThdRopeParams params{};
  params.input = pointer<const void>(input);
  params.output = pointer<void>(output);
  params.freqs = pointer<const float>(freqs);
  params.batch = {pointer<const int32_t>(cu_seqlens),
                  pointer<const int32_t>(start_positions),
                  num_sequences,
                  table_rows,
                  cp_size,
                  cp_rank};
  params.num_tokens = num_tokens;
  params.stride_t = stride_t;
  params.stride_h = stride_h;
  params.stride_d = stride_d;
  params.num_heads = static_cast<int32_t>(std::min(num_heads, kMaxRowExtent));
  params.head_dim = static_cast<int32_t>(std::min(head_dim, kMaxRowExtent));
  params.rotary_dim = static_cast<int32_t>(std::min(rotary_dim, kMaxRowExtent));
  params.dtype = static_cast<DataType>(dtype);
  params.interleaved = interleaved;
  params.transpose = transpose;
  check_extents(params, num_heads, head_dim);

  // While this thread holds the GIL, so that no other one changes the environment meanwhile.
  const Path path = choose_path(request_from_environment(), params.batch, num_tokens);
  int64_t blocks = 0;
  {
    const nb::gil_scoped_release release;
    blocks = device < 0 ? run_on_cpu(params, path, num_threads)
                        : run_on_cuda(params, path, device, stream);
  }
  if (blocks > 0) {
    PathCounter &counter = path_counters[static_cast<int>(path)];
    counter.calls.fetch_add(1, std::memory_order_relaxed);
    counter.blocks.fetch_add(blocks, std::memory_order_relaxed);
    if (routed) counter.routed.fetch_add(1, std::memory_order_relaxed);
  }
  return static_cast<int>(path);
}

nb::dict path_counts() {
  nb::dict counts;
  const char *const names[] = {"legacy_grid", "token_linear"};
  for (int path = 0; path < 2; ++path) {
    nb::dict count;
    count["calls"] = path_counters[path].calls.load(std::memory_order_relaxed);
    count["blocks"] = path_counters[path].blocks.load(std::memory_order_relaxed);
    count["routed"] = path_counters[path].routed.load(std::memory_order_relaxed);
    counts[names[path]] = count;
  }
  return counts;
}

// The rule alone, for its table of tests.
int choose_path_for(const std::optional<std::string> &value, int64_t table_rows,
                    int64_t num_sequences, int64_t num_tokens, int32_t cp_size) {
  const PackedBatch batch{nullptr, nullptr, num_sequences, table_rows, cp_size, 0};
  return static_cast<int>(choose_path(checked_request(value), batch, num_tokens));
}

// Owner and table row of each local token, written to int64 arrays on the host.
void locate_tokens(uintptr_t cu_seqlens, uintptr_t start_positions, int64_t num_sequences,
                   int64_t table_rows, int32_t cp_size, int32_t cp_rank, int64_t num_tokens,
                   uintptr_t sequences, uintptr_t rows) {
  const PackedBatch batch{pointer<const int32_t>(cu_seqlens),
                          pointer<const int32_t>(start_positions),
                          num_sequences,
                          table_rows,
                          cp_size,
                          cp_rank};
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t sequence = find_sequence(batch, token);
    pointer<int64_t>(sequences)[token] = sequence;
    pointer<int64_t>(rows)[token] = table_row(batch, token, sequence);
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

int64_t run_on_cuda(const ThdRopeParams &, Path, int, uintptr_t) {
  throw UnsupportedDevice(
      "transformer-engine-overlay was built without CUDA, and the tensors are on a CUDA device; "
      "reinstall it from source without TE_OVERLAY_CUDA=0");
}
#endif

}  // namespace thd_rope
}  // namespace transformer_engine

NB_MODULE(_native, m) {
  using namespace transformer_engine::thd_rope;  // NOLINT: the module's own namespace
  nb::exception<UnsupportedDevice>(m, "UnsupportedDeviceError", PyExc_RuntimeError);
  m.def("thd_rope", &thd_rope);
  m.def("path_counts", &path_counts);
  m.def("count_passed_through", [] { passed_through.fetch_add(1, std::memory_order_relaxed); });
  m.def("passed_through", [] { return passed_through.load(std::memory_order_relaxed); });
  m.def("path_request", [] { return static_cast<int>(request_from_environment()); });
  m.def("choose_path", &choose_path_for, nb::arg("value").none(), nb::arg("table_rows"),
        nb::arg("num_sequences"), nb::arg("num_tokens"), nb::arg("cp_size"));
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
  m.attr("FLOAT32") = static_cast<int>(DataType::kFloat32);
  m.attr("FLOAT16") = static_cast<int>(DataType::kFloat16);
  m.attr("BFLOAT16") = static_cast<int>(DataType::kBFloat16);
  m.attr("WITH_CUDA") = static_cast<bool>(TE_OVERLAY_WITH_CUDA);
  m.attr("CUDA_ARCHS") = built_chips();
}
