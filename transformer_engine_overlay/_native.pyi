# SPDX-License-Identifier: Apache-2.0
"""Types of the compiled module; `native/binding.cpp` says what each function does."""

from collections.abc import Callable
from typing import Any

import torch

LEGACY_GRID: int
TOKEN_LINEAR: int
AUTOMATIC: int
MAX_ROW_EXTENT: int
MAX_SEQUENCES: int
WITH_CUDA: bool
CUDA_ARCHS: str

class RouterSwitch:
    active: bool

def rotate(
    t: object,
    freqs: object,
    start_positions: object,
    interleaved: object,
    cu_seqlens: object,
    cp_size: object,
    cp_rank: object,
    transpose: bool,
    routed: bool,
    prepared: bool,
    /,
) -> torch.Tensor | None: ...
def rotate_fused(
    query: object,
    query_output: object,
    key: object,
    key_output: object,
    value: object,
    value_output: object,
    query_freqs: object,
    key_freqs: object,
    start_positions: object,
    interleaved: bool,
    cu_seqlens: object,
    cp_size: object,
    cp_rank: object,
    transpose: bool,
    /,
) -> bool: ...
def make_routed(
    original: Callable[..., Any],
    prepare: Callable[..., Any],
    give_up: Callable[[str], None],
    thd_format: object,
    router_switch: RouterSwitch,
    transpose: bool,
    /,
) -> Callable[..., Any]: ...

class UnsupportedDeviceError(RuntimeError): ...

def count_passed_through() -> None: ...
def passed_through() -> int: ...
def path_counts() -> dict[str, dict[str, int]]: ...
def path_request() -> int: ...
def report_faults() -> None: ...
def reset_faults(device: int, /) -> None: ...
def body_counts() -> dict[str, int]: ...
def fused_calls() -> int: ...
def choose_body(
    dtype: int,
    interleaved: bool,
    num_heads: int,
    head_dim: int,
    rotary_dim: int,
    strides: tuple[int, int, int],
    addresses: tuple[int, int, int],
) -> int: ...
def choose_fused_body(
    dtype: int,
    interleaved: bool,
    query_heads: int,
    key_heads: int,
    head_dim: int,
    rotary_dim: int,
    value_dim: int,
    /,
) -> int: ...
def locate_tokens(
    cu_seqlens: int,
    start_positions: int,
    num_sequences: int,
    table_rows: int,
    cp_size: int,
    cp_rank: int,
    num_tokens: int,
    warp_wide: bool,
    sequences: int,
    rows: int,
    /,
) -> None: ...
def cuda_versions() -> tuple[int, int]: ...
def driver_complaint(driver: int, runtime: int, /) -> str: ...
