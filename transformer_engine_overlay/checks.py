# SPDX-License-Identifier: Apache-2.0
"""What a call must look like, checked on the host before any launch and without a synchronisation.

Each error names the argument, what it is, what it must be and, where there is one, the remedy. A
plain call, which needs no word and no conversion, never comes here: `native/torch_call.cpp` sees
that it is one.
"""

from __future__ import annotations

import operator

import torch

from transformer_engine_overlay import _native

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", bool, int, int]


def normalize(
    name: str,
    t: object,
    freqs: object,
    cu_seqlens: object,
    start_positions: object,
    interleaved: object,
    cp_size: object,
    cp_rank: object,
    table_name: str = "freqs",
) -> Call:
    """Return the arguments as the kernels take them, or raise what is wrong with them.

    Parameters
    ----------
    name, table_name : str
        What to call `t` and `freqs` in a message.
    t, freqs, cu_seqlens, start_positions, interleaved, cp_size, cp_rank
        As for `transformer_engine_overlay.apply_rotary_pos_emb_thd`.

    Returns
    -------
    tuple
        All but the names, the table contiguous float32 and the metadata contiguous int32.

    Raises
    ------
    TypeError, ValueError
        See the module.
    """
    t = check_input(name, t)
    table = check_table(table_name, freqs, t)
    boundaries = check_metadata("cu_seqlens", cu_seqlens, t, 1, "b + 1 entries")
    if boundaries.shape[0] > _native.MAX_SEQUENCES:
        raise ValueError(
            f"cu_seqlens has {boundaries.shape[0]} entries; it must have at most "
            f"{_native.MAX_SEQUENCES}: split the batch"
        )
    starts = None
    if start_positions is not None:
        starts = check_metadata(
            "start_positions",
            start_positions,
            t,
            boundaries.shape[0] - 1,
            "an entry for each sequence",
        )
    if not isinstance(interleaved, int):
        raise TypeError(f"interleaved is of type {type(interleaved).__name__}; it must be a bool")
    ranks = check_context_parallel(cp_size, cp_rank)
    return (t, table, boundaries, starts, bool(interleaved), *ranks)


def check_tensor(name: str, value: object) -> torch.Tensor:
    """Return `value` as a dense torch.Tensor if it is one."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is of type {type(value).__name__}; it must be a torch.Tensor")
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise _without_memory(name, value)
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        # A subclass may answer torch's functions in its own way: take it as what it is.
        with torch._C.DisableTorchFunctionSubclass():
            value = value.as_subclass(torch.Tensor)
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else value.layout
        raise TypeError(f"{name} is {kind}; it must be a dense (strided) tensor")
    return value


def check_memory(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return `value` if its elements are in memory, those of a lazy tensor written out."""
    if value.is_neg() or value._is_zerotensor():
        return value.resolve_neg().clone()
    # The address of a slice of nothing is its offset.
    offset = value.storage_offset() * value.element_size()
    if value.numel() > 0 and value.data_ptr() in (0, offset):
        raise _without_memory(name, value)
    return value


def _without_memory(name: str, value: torch.Tensor) -> TypeError:
    return TypeError(
        f"{name} is a {type(value).__name__} without memory of its own (fake, distributed, "
        "quantised, freed, ...); pass a plain tensor"
    )


def check_input(name: str, t: object) -> torch.Tensor:
    """Return `t` if it is a packed tensor ``[t, h, d]`` of a dtype and on a device we cover."""
    t = check_tensor(name, t)
    if t.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {t.dtype}; it must be float32, float16 or bfloat16")
    if t.dim() != 3:
        raise ValueError(f"{name} has shape {list(t.shape)}; it must be 3-D, [t, h, d]")
    if max(t.shape[1:]) > _native.MAX_ROW_EXTENT:
        raise ValueError(
            f"{name} has shape {list(t.shape)}; h and d must each be at most "
            f"{_native.MAX_ROW_EXTENT}"
        )
    if t.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on device {t.device}; it must be on a CUDA device or the CPU")
    return check_memory(name, t)


def check_table(name: str, freqs: object, t: torch.Tensor) -> torch.Tensor:
    """Return the angle table as contiguous float32; a clean table comes back as it is."""
    freqs = check_tensor(name, freqs)
    if freqs.dim() != 4 or freqs.shape[1] != 1 or freqs.shape[2] != 1:
        raise ValueError(
            f"{name} has shape {list(freqs.shape)}; it must be [s, 1, 1, d2]: one table for all "
            "sequences and heads"
        )
    rotary_dim = freqs.shape[3]
    if rotary_dim % 2 or rotary_dim > t.shape[2]:
        raise ValueError(
            f"{name} has d2 = {rotary_dim} (its last dimension); it must be even and at most "
            f"d = {t.shape[2]}, the last dimension of the rotated tensor"
        )
    check_device(name, freqs, t)
    if not freqs.is_floating_point():
        raise TypeError(f"{name} has dtype {freqs.dtype}; it must be a floating-point type")
    return check_memory(name, freqs).to(torch.float32).contiguous()


def check_metadata(
    name: str, value: object, t: torch.Tensor, min_entries: int, what: str
) -> torch.Tensor:
    """Return an int32 vector on `t`'s device, contiguous, with at least `min_entries` entries."""
    value = check_tensor(name, value)
    if value.dtype != torch.int32:
        raise TypeError(
            f"{name} has dtype {value.dtype}; it must be torch.int32: pass {name}.to(torch.int32)"
        )
    if value.dim() != 1 or value.shape[0] < min_entries:
        raise ValueError(
            f"{name} has shape {list(value.shape)}; it must be 1-D with {what}, at least "
            f"{min_entries}"
        )
    check_device(name, value, t)
    return check_memory(name, value).contiguous()


def check_device(name: str, value: torch.Tensor, t: torch.Tensor) -> None:
    """Raise unless `value` is on the device of `t`."""
    if value.device != t.device:
        raise ValueError(
            f"{name} is on {value.device}; it must be on {t.device}, where the rotated tensor is: "
            f"pass {name}.to('{t.device}')"
        )


def check_same_rows(q: object, k: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as `check_tensor` does if query and key differ in their heads alone."""
    q, k = check_tensor("q", q), check_tensor("k", k)
    if q.dim() != 3 or k.dim() != 3 or q.shape[::2] != k.shape[::2]:
        raise ValueError(
            f"q has shape {list(q.shape)} and k {list(k.shape)}; they must be [t, h_q, d] and "
            "[t, h_k, d]"
        )
    if q.dtype != k.dtype or q.device != k.device:
        raise ValueError(
            f"q is {q.dtype} on {q.device} and k {k.dtype} on {k.device}; they must have one dtype "
            "and one device"
        )
    return q, k


def check_split(qkv: object, split: object) -> tuple[int, int, int]:
    """Return the widths of query heads, key and value if they make up a row of `qkv`."""
    if not (isinstance(qkv, torch.Tensor) and torch.compiler.is_compiling()):
        qkv = check_tensor("qkv", qkv)  # of a traced one only the shape is there
    if qkv.dim() != 3:
        raise ValueError(
            f"qkv has shape {list(qkv.shape)}; it must be 3-D, [t, h, sum(qkv_split_arg_list)]"
        )
    if not isinstance(split, list | tuple) or len(split) != 3:
        raise TypeError(
            f"qkv_split_arg_list is {split!r}; it must be a list of three ints, [n * d, d, d_v]"
        )
    query, key, value = (_check_int("each of qkv_split_arg_list", width) for width in split)
    if key < 1 or query < 1 or query % key or value < 0:
        raise ValueError(
            f"qkv_split_arg_list is {list(split)}; it must be [n * d, d, d_v], the query width a "
            "multiple of the key width"
        )
    if query + key + value != qkv.shape[2]:
        raise ValueError(
            f"qkv has shape {list(qkv.shape)}, and qkv_split_arg_list {list(split)} sums to "
            f"{query + key + value}; it must sum to the last dimension"
        )
    return query, key, value


def check_context_parallel(cp_size: object, cp_rank: object) -> tuple[int, int]:
    """Return both as ints if ``0 <= cp_rank < cp_size``."""
    size = _check_int("cp_size", cp_size)
    rank = _check_int("cp_rank", cp_rank)
    if not 1 <= size < 1 << 31:
        raise ValueError(f"cp_size is {size}; it must be at least 1 and below 2**31")
    if not 0 <= rank < size:
        raise ValueError(f"cp_rank is {rank}; it must be in [0, cp_size) = [0, {size})")
    return size, rank


def _check_int(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is of type {type(value).__name__}; it must be an int") from None
