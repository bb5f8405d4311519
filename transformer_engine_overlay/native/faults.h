// SPDX-License-Identifier: Apache-2.0
//
// The fault records of all devices, and of the CPU backend, as the host sees them.

#ifndef TRANSFORMER_ENGINE_OVERLAY_NATIVE_FAULTS_H_
#define TRANSFORMER_ENGINE_OVERLAY_NATIVE_FAULTS_H_

#include <atomic>
#include <mutex>

#include "fused_rope/thd_fault.h"

namespace transformer_engine {
namespace thd_rope {

constexpr int kMaxDevices = 64;

// One for each device. `record` is null until the first call on it.
struct DeviceFaults {
  std::atomic<FaultRecord *> record{nullptr};
  std::atomic<bool> reported{false};
  FaultSink sink{nullptr, nullptr};  // the same record as the device addresses it
  std::mutex mutex;                  // for the first call
};

// Of device `device`, or of the CPU backend for -1; null for a device beyond kMaxDevices.
inline DeviceFaults *device_faults(int device) {
  static DeviceFaults all[kMaxDevices + 1];
  return device < kMaxDevices ? &all[device + 1] : nullptr;
}

// Copies the fault that a device met, if there is one that was not taken yet. Never waits for it.
inline bool take_fault(int device, Fault *fault) {
  DeviceFaults *faults = device_faults(device);
  if (faults == nullptr) return false;
  const FaultRecord *record = faults->record.load(std::memory_order_acquire);
  if (record == nullptr || *const_cast<const volatile uint32_t *>(&record->valid) == 0) {
    return false;
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  if (faults->reported.exchange(true)) return false;
  *fault = record->fault;
  return true;
}

// Records a fault of the CPU backend, the first one only.
void record_host_fault(const PackedBatch &batch, int64_t token);

// Makes the record of `device`, the current one, at the first call; also within a capture.
FaultSink fault_sink(int device);

// Forgets the fault of `device`, for tests; waits for it.
void reset_faults(int device);

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_NATIVE_FAULTS_H_
