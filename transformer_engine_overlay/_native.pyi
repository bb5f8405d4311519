# SPDX-License-Identifier: Apache-2.0
"""Types of the compiled module; `native/binding.cpp` says what each function does."""

LEGACY_GRID: int
TOKEN_LINEAR: int
AUTOMATIC: int
FLOAT32: int
FLOAT16: int
BFLOAT16: int
WITH_CUDA: bool
CUDA_ARCHS: str

def thd_rope(
    source: int,
    output: int,
    freqs: int,
    cu_seqlens: int,
    start_positions: int,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    rotary_dim: int,
    stride_t: int,
    stride_h: int,
    stride_d: int,
    num_sequences: int,
    table_rows: int,
    cp_size: int,
    cp_rank: int,
    dtype: int,
    interleaved: bool,
    transpose: bool,
    device: int,
    stream: int,
    num_threads: int,
    routed: bool,
    /,
) -> int: ...

class UnsupportedDeviceError(RuntimeError): ...

def count_passed_through() -> None: ...
def passed_through() -> int: ...
def path_counts() -> dict[str, dict[str, int]]: ...
def path_request() -> int: ...
def choose_path(
    value: str | None, table_rows: int, num_sequences: int, num_tokens: int, cp_size: int
) -> int: ...
def locate_tokens(
    cu_seqlens: int,
    start_positions: int,
    num_sequences: int,
    table_rows: int,
    cp_size: int,
    cp_rank: int,
    num_tokens: int,
    sequences: int,
    rows: int,
    /,
) -> None: ...
def cuda_versions() -> tuple[int, int]: ...
def driver_complaint(driver: int, runtime: int, /) -> str: ...
