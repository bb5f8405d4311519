// SPDX-License-Identifier: Apache-2.0
//
// The two paths on host memory: the same index math and arithmetic as on the GPU, simple loops.

#include <algorithm>
#include <exception>
#include <thread>
#include <vector>

#include "backend.h"
#include "cpu_types.h"
#include "faults.h"
#include "fused_rope/thd_rotation.h"

namespace transformer_engine {
namespace thd_rope {
namespace {

// Below this many elements a call is not worth a second thread.
constexpr int64_t kElementsPerThread = 16384;

// Calls work(worker, begin, end) for consecutive parts of [0, size). Threads live for the call
// only, so that a fork in between finds none.
template <typename Work>
void parallel_for(int64_t size, int num_workers, const Work &work) {
  std::vector<std::thread> threads;
  const auto begin_of = [=](int worker) {
    return size / num_workers * worker + std::min<int64_t>(worker, size % num_workers);
  };
  threads.reserve(num_workers - 1);
  for (int worker = 1; worker < num_workers; ++worker) {
    const int64_t begin = begin_of(worker), end = begin_of(worker + 1);
    try {
      threads.emplace_back([&work, worker, begin, end] { work(worker, begin, end); });
    } catch (const std::exception &) {  // no thread to be had: this one does the part
      work(worker, begin, end);
    }
  }
  work(0, 0, begin_of(1));
  for (std::thread &thread : threads) thread.join();
}

template <typename T, bool kInterleaved, bool kTranspose>
class CpuRope {
 public:
  CpuRope(const ThdRopeParams &params, int num_workers)
      : params_(params),
        row_size_(static_cast<int64_t>(params.num_heads) * params.head_dim),
        angles_(num_workers, std::vector<PairAngles>(params.rotary_dim / 2)) {}

  void run_token_linear(int worker, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      process_token(worker, token, find_sequence(params_.batch, token));
    }
  }

  // As the legacy-grid kernel: a block takes every table_rows-th row of its sequence; the first and
  // the last sequence also take the rows outside of all sequences.
  void run_legacy_grid(int worker, int64_t begin, int64_t end) {
    const PackedBatch &batch = params_.batch;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t sequence = block / batch.table_rows;
      const LocalRows rows = local_rows(batch, sequence);
      const bool first = sequence == 0, last = sequence == batch.num_sequences - 1;
      const int64_t from = first ? 0 : std::max<int64_t>(rows.begin, 0);
      const int64_t to = last ? params_.num_tokens : std::min(rows.end, params_.num_tokens);
      for (int64_t token = from + block % batch.table_rows; token < to; token += batch.table_rows) {
        process_token(worker, token, sequence);
      }
    }
  }

 private:
  void process_token(int worker, int64_t token, int64_t sequence) {
    T *output = static_cast<T *>(params_.output) + token * row_size_;
    const TableRow row = table_row(params_.batch, token, sequence);
    if (row.faulty) record_host_fault(params_.batch, token);
    if (row.index < 0) {
      std::fill_n(output, row_size_, from_float<T>(0.0f));
      return;
    }
    const T *input = static_cast<const T *>(params_.input) + token * params_.stride_t;
    rotate_row(input, output, params_.freqs + row.index * params_.rotary_dim, angles_[worker]);
  }

  void rotate_row(const T *input, T *output, const float *table_row,
                  std::vector<PairAngles> &angles) const {
    const int32_t pairs = params_.rotary_dim / 2;
    const int32_t distance = pair_distance<kInterleaved>(params_.rotary_dim);
    for (int32_t i = 0; i < pairs; ++i) {
      angles[i] = load_pair_angles<kInterleaved>(table_row, i, params_.rotary_dim);
    }
    for (int32_t head = 0; head < params_.num_heads; ++head) {
      const T *x = input + head * params_.stride_h;
      T *y = output + static_cast<int64_t>(head) * params_.head_dim;
      for (int32_t i = 0; i < pairs; ++i) {
        const int32_t first = first_of_pair<kInterleaved>(i), second = first + distance;
        const PairValues values{to_float(x[first * params_.stride_d]),
                                to_float(x[second * params_.stride_d])};
        const PairValues rotated = rotate_pair<kTranspose>(values, angles[i]);
        y[first] = from_float<T>(rotated.first);
        y[second] = from_float<T>(rotated.second);
      }
      for (int32_t i = params_.rotary_dim; i < params_.head_dim; ++i) {
        y[i] = x[i * params_.stride_d];
      }
    }
  }

  const ThdRopeParams &params_;
  const int64_t row_size_;
  std::vector<std::vector<PairAngles>> angles_;  // one per worker
};

template <typename T, bool kInterleaved, bool kTranspose>
int64_t run_instance(const ThdRopeParams &params, Path path, int num_workers) {
  CpuRope<T, kInterleaved, kTranspose> rope(params, num_workers);
  const bool token_linear = path == Path::kTokenLinear;
  const int64_t blocks = token_linear ? params.num_tokens : legacy_grid_blocks(params.batch);
  parallel_for(blocks, num_workers, [&](int worker, int64_t begin, int64_t end) {
    if (token_linear) {
      rope.run_token_linear(worker, begin, end);
    } else {
      rope.run_legacy_grid(worker, begin, end);
    }
  });
  return blocks;
}

template <typename T>
int64_t run_dtype(const ThdRopeParams &params, Path path, int num_workers) {
  if (params.interleaved) {
    return params.transpose ? run_instance<T, true, true>(params, path, num_workers)
                            : run_instance<T, true, false>(params, path, num_workers);
  }
  return params.transpose ? run_instance<T, false, true>(params, path, num_workers)
                          : run_instance<T, false, false>(params, path, num_workers);
}

}  // namespace

void record_host_fault(const PackedBatch &batch, int64_t token) {
  static FaultRecord record;
  DeviceFaults *faults = device_faults(-1);
  if (faults->record.load(std::memory_order_acquire) != nullptr && record.valid != 0) return;
  const std::lock_guard<std::mutex> lock(faults->mutex);
  if (record.valid != 0) return;
  record.fault = find_fault(batch, token);
  std::atomic_thread_fence(std::memory_order_release);
  *const_cast<volatile uint32_t *>(&record.valid) = 1;
  faults->record.store(&record, std::memory_order_release);
}

int64_t run_on_cpu(const ThdRopeParams &params, Path path, int num_threads) {
  if (!has_elements(params)) return 0;
  const int64_t elements = params.num_tokens * params.num_heads * params.head_dim;
  if (params.batch.num_sequences == 0 || params.batch.table_rows == 0) {
    const size_t size = params.dtype == DataType::kFloat32 ? 4 : 2;
    std::memset(params.output, 0, elements * size);
    return 0;
  }
  const int64_t useful = elements / kElementsPerThread + 1;
  const int num_workers =
      static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(num_threads, useful)));
  switch (params.dtype) {
    case DataType::kFloat16:
      return run_dtype<Float16>(params, path, num_workers);
    case DataType::kBFloat16:
      return run_dtype<BFloat16>(params, path, num_workers);
    default:
      return run_dtype<float>(params, path, num_workers);
  }
}

}  // namespace thd_rope
}  // namespace transformer_engine
