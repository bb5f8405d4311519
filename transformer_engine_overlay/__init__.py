# SPDX-License-Identifier: Apache-2.0
"""Token-linear rotary position embedding for packed (THD) batches."""

from importlib.metadata import PackageNotFoundError, version

try:
    import transformer_engine_overlay._native  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "transformer_engine_overlay._native":
        raise
    raise ModuleNotFoundError(
        f"the native module is not in {__path__[0]}. If that is a source checkout, it hides the "
        "installed package: work in another folder, or install it with `pip install -e .`",
        name=error.name,
    ) from None

from transformer_engine_overlay import ops  # noqa: F401 (registers the operator)
from transformer_engine_overlay.fused import (
    apply_fused_qkv_rotary_pos_emb_thd,
    apply_rotary_pos_emb_thd_qk,
)
from transformer_engine_overlay.gate import OverlayError
from transformer_engine_overlay.patching import disable, enable, patched, status
from transformer_engine_overlay.ranks import status_across_ranks
from transformer_engine_overlay.thd import apply_rotary_pos_emb_thd, path_counts

try:
    __version__ = version("transformer-engine-overlay")
except PackageNotFoundError:  # built by hand and put on PYTHONPATH
    __version__ = "0+unknown"

__all__ = [
    "OverlayError",
    "__version__",
    "apply_fused_qkv_rotary_pos_emb_thd",
    "apply_rotary_pos_emb_thd",
    "apply_rotary_pos_emb_thd_qk",
    "disable",
    "enable",
    "patched",
    "path_counts",
    "status",
    "status_across_ranks",
]
