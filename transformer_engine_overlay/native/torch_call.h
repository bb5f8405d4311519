// SPDX-License-Identifier: Apache-2.0
//
// Calls with torch tensors, from C++: a routed call must not cost more host time than the call that
// it replaces, and in Python it costs twice as much.

#ifndef TRANSFORMER_ENGINE_OVERLAY_NATIVE_TORCH_CALL_H_
#define TRANSFORMER_ENGINE_OVERLAY_NATIVE_TORCH_CALL_H_

#include <nanobind/nanobind.h>

namespace transformer_engine {
namespace thd_rope {

// The arguments of a rotation, borrowed.
struct TorchCall {
  nanobind::handle t, freqs, start_positions, interleaved, cu_seqlens, cp_size, cp_rank;
  bool transpose;
  bool routed;
  bool prepared;  // has been through checks.py: what goes wrong now is an error
};

// Rotates, if all arguments are as the kernels take them: a plain call. Returns the new tensor, or
// None if something about the arguments needs a word or a conversion, which checks.py has.
nanobind::object rotate_plain(const TorchCall &call);

// Whether the router routes; shared by its functions.
struct RouterSwitch {
  bool active = true;
};

// Makes the function that stands in for `original`, a builtin as the original is one. THD calls
// that are plain are rotated; `prepare`, given the arguments, takes the other THD calls; `give_up`,
// given the exception, is told that this build cannot run here. All else goes to `original`.
nanobind::object make_routed(nanobind::object original, nanobind::object prepare,
                             nanobind::object give_up, nanobind::object thd_format,
                             nanobind::object router_switch, bool transpose);

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_NATIVE_TORCH_CALL_H_
