// SPDX-License-Identifier: Apache-2.0
//
// The extension module of the stub TransformerEngine, bound by pybind11 as the real one is, so that
// torch.compile meets the same kinds of objects. The rotation is the stub's.

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

enum class Layout { kSbhd, kBshd, kThd };

template <int sign>
py::object rotate(py::object t, py::object freqs, py::object start_positions, Layout layout,
                  bool interleaved, py::object cu_seqlens, int cp_size, int cp_rank) {
  return py::module_::import("transformer_engine.rotation")
      .attr("rotate")(sign, t, freqs, start_positions, static_cast<int>(layout), interleaved,
                      cu_seqlens, cp_size, cp_rank);
}

// What pybind11 writes for functions that take torch's tensors.
constexpr char kSignature[] =
    "rotate(arg0: torch.Tensor, arg1: torch.Tensor, arg2: Optional[torch.Tensor], "
    "arg3: transformer_engine_torch.NVTE_QKV_Format, arg4: bool, arg5: Optional[torch.Tensor], "
    "arg6: int, arg7: int) -> torch.Tensor";

}  // namespace

PYBIND11_MODULE(transformer_engine_torch, m) {
  py::enum_<Layout>(m, "NVTE_QKV_Format", py::module_local())
      .value("NVTE_SBHD", Layout::kSbhd)
      .value("NVTE_BSHD", Layout::kBshd)
      .value("NVTE_THD", Layout::kThd);
  py::options options;
  options.disable_function_signatures();
  m.def("fused_rope_forward", &rotate<1>, kSignature);
  m.def("fused_rope_backward", &rotate<-1>, kSignature);
}
