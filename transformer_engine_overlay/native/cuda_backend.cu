// SPDX-License-Identifier: Apache-2.0
//
// Queues a call on a GPU and turns what CUDA reports into words.

#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "backend.h"
#include "faults.h"
#include "fused_qkv_kernel.cuh"
#include "fused_rope/thd_launch.cuh"
#include "legacy_grid.cuh"

namespace transformer_engine {
namespace thd_rope {
namespace {

void check_cuda(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // do not leave it for an unrelated call to find
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + ": " +
                           cudaGetErrorString(error));
}

// Makes `device` current for the calling thread and puts the former one back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&former_), "reading the current CUDA device");
    if (former_ == device) return;
    check_cuda(cudaSetDevice(device), "making the tensor's CUDA device current");
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(former_);
  }
  DeviceGuard(const DeviceGuard &) = delete;
  DeviceGuard &operator=(const DeviceGuard &) = delete;

 private:
  int former_ = 0;
  bool changed_ = false;
};

// Asked once: the answer cannot change within a process.
const std::string &cached_driver_complaint() {
  static const std::string complaint = driver_complaint(cuda_versions());
  return complaint;
}

[[noreturn]] void throw_no_kernel_image(int device) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  const std::string chip = std::to_string(major) + std::to_string(minor);
  throw UnsupportedDevice("cuda:" + std::to_string(device) + " has compute capability " +
                          std::to_string(major) + "." + std::to_string(minor) +
                          ", but transformer-engine-overlay was built for chips " + built_chips() +
                          "; reinstall it from source with TE_OVERLAY_CUDA_ARCHS=" + chip);
}

}  // namespace

namespace {

// One on each device that the module is loaded on: nothing to allocate, zero from the start.
__device__ unsigned int fault_latch;

// Lets this thread allocate while a stream is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture &) = delete;
  RelaxedCapture &operator=(const RelaxedCapture &) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

FaultSink fault_sink(int device) {
  DeviceFaults *faults = device_faults(device);
  if (faults == nullptr) return {nullptr, nullptr};
  if (faults->record.load(std::memory_order_acquire) != nullptr) return faults->sink;
  const std::lock_guard<std::mutex> lock(faults->mutex);
  if (faults->record.load(std::memory_order_relaxed) != nullptr) return faults->sink;
  const RelaxedCapture relaxed;
  void *host = nullptr, *mapped = nullptr, *latch = nullptr;
  const bool made = cudaHostAlloc(&host, sizeof(FaultRecord), cudaHostAllocMapped) == cudaSuccess &&
                    cudaHostGetDevicePointer(&mapped, host, 0) == cudaSuccess &&
                    cudaGetSymbolAddress(&latch, fault_latch) == cudaSuccess;
  if (!made) {  // faults go unreported; the call itself can do without
    cudaGetLastError();
    return {nullptr, nullptr};
  }
  std::memset(host, 0, sizeof(FaultRecord));
  faults->sink = {static_cast<unsigned int *>(latch), static_cast<FaultRecord *>(mapped)};
  faults->record.store(static_cast<FaultRecord *>(host), std::memory_order_release);
  return faults->sink;
}

void reset_faults(int device) {
  DeviceFaults *faults = device_faults(device);
  FaultRecord *record = faults == nullptr ? nullptr : faults->record.load();
  if (record == nullptr) return;
  if (device >= 0) {
    const DeviceGuard guard(device);
    check_cuda(cudaDeviceSynchronize(), "waiting for the device");
    check_cuda(cudaMemset(faults->sink.latch, 0, sizeof(unsigned int)), "clearing the latch");
  }
  record->valid = 0;
  faults->reported.store(false);
}

CudaVersions cuda_versions() {
  CudaVersions versions{0, 0};
  if (cudaDriverGetVersion(&versions.driver) != cudaSuccess) versions.driver = 0;
  cudaRuntimeGetVersion(&versions.runtime);
  return versions;
}

namespace {

void check_driver() {
  const std::string &complaint = cached_driver_complaint();
  if (!complaint.empty()) throw UnsupportedDevice(complaint);
}

void check_grid(int64_t blocks, Path path, const PackedBatch &batch, int64_t num_tokens) {
  if (blocks <= kMaxGridBlocks) return;
  const bool token_linear = path == Path::kTokenLinear;
  throw std::invalid_argument(
      std::string(token_linear ? "the token-linear grid" : "the legacy grid") + " would be " +
      std::to_string(blocks) + " blocks (" + std::to_string(batch.table_rows) + " table rows, " +
      std::to_string(batch.num_sequences) + " sequences, " + std::to_string(num_tokens) +
      " tokens); CUDA launches at most " + std::to_string(kMaxGridBlocks) +
      (token_linear ? "; split the batch" : "; unset " + std::string(kPathVariable)));
}

void check_launch(cudaError_t error, int device) {
  if (error == cudaErrorNoKernelImageForDevice) throw_no_kernel_image(device);
  check_cuda(error, "launching THD RoPE");
}

}  // namespace

int64_t run_on_cuda(const ThdRopeParams &params, Path path, int device, uintptr_t stream) {
  if (!has_elements(params)) return 0;
  check_driver();
  const bool token_linear = path == Path::kTokenLinear;
  const int64_t blocks =
      token_linear ? token_linear_grid_blocks(params) : legacy_grid_blocks(params.batch);
  check_grid(blocks, path, params.batch, params.num_tokens);
  const DeviceGuard guard(device);
  const cudaStream_t cuda_stream = reinterpret_cast<cudaStream_t>(stream);
  ThdRopeParams reporting = params;
  reporting.faults = fault_sink(device);
  check_launch(token_linear ? launch_token_linear(reporting, cuda_stream)
                            : launch_legacy_grid(reporting, cuda_stream),
               device);
  return params.batch.num_sequences == 0 || params.batch.table_rows == 0 ? 0 : blocks;
}

int64_t run_fused_on_cuda(const FusedQkvParams &params, int device, uintptr_t stream) {
  check_driver();
  const int64_t blocks = fused_grid_blocks(params, choose_fused_body(params));
  check_grid(blocks, Path::kTokenLinear, params.batch, params.num_tokens);
  const DeviceGuard guard(device);
  FusedQkvParams reporting = params;
  reporting.faults = fault_sink(device);
  check_launch(launch_fused_qkv(reporting, reinterpret_cast<cudaStream_t>(stream)), device);
  return blocks;
}

}  // namespace thd_rope
}  // namespace transformer_engine
