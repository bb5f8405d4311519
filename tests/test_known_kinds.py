# SPDX-License-Identifier: Apache-2.0
"""Kinds of trouble met with packed RoPE and its installs, those without a test elsewhere.

README.md beside this file says which test stands for which kind.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packed import DTYPES, PAIRINGS, boundaries, randn, random_table
from programs import run_python
from stub_fixtures import Format, OriginalCalledError, original
from test_router import arguments as routed_arguments

from transformer_engine_overlay import _native, apply_rotary_pos_emb_thd, router
from transformer_engine_overlay.packing import merge_ranks, split_for_rank
from transformer_engine_overlay.reference import rope_thd_reference
from transformer_engine_overlay.thd import rotate_thd
from transformer_engine_overlay.verify import TOLERANCES, same_bits

BothPaths = Callable[..., torch.Tensor]
WIDTHS = [(d, d2) for d in (66, 68, 72, 80, 100, 192) for d2 in (d, 20, 36)]


@pytest.mark.parametrize(("head_dim", "rotary_dim"), WIDTHS)
@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_k14_halves_and_rests_that_are_no_whole_vectors(
    device: torch.device,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool,
    both_paths: BothPaths,
) -> None:
    freqs, cu = random_table(7, rotary_dim, device), boundaries([0, 3, 7], device)
    for dtype in DTYPES:
        t = randn(7, 3, head_dim, dtype=dtype, device=device)
        y = both_paths(lambda t=t: rotate_thd(t, freqs, cu, None, interleaved, 1, 0, False))
        expected = rope_thd_reference(t, freqs, cu, interleaved=interleaved)
        rtol, atol = TOLERANCES[dtype]
        torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=atol)
        assert same_bits(y[..., rotary_dim:], t[..., rotary_dim:])


def test_k15_partial_rotary_in_every_head_of_many(
    device: torch.device, both_paths: BothPaths
) -> None:
    """More than ten thousand rows of a head: wrong heads behind the first would be seen."""
    t = randn(257, 40, 128, dtype=torch.bfloat16, device=device)
    freqs, cu = random_table(257, 64, device), boundaries([0, 100, 257], device)
    y = both_paths(lambda: rotate_thd(t, freqs, cu, None, False, 1, 0, False))
    rtol, atol = TOLERANCES[t.dtype]
    expected = rope_thd_reference(t, freqs, cu)
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=atol)
    assert same_bits(y[..., 64:], t[..., 64:])


def test_k16_width_comes_from_the_table(device: torch.device, both_paths: BothPaths) -> None:
    """A table much narrower than a head turns its pairs alone; a wider one is refused."""
    t, cu = randn(9, 4, 64, device=device), boundaries([0, 9], device)
    wide = torch.full((9, 1, 1, 24), float("nan"), device=device)
    wide[..., 8:16] = random_table(9, 8, device)
    freqs = wide[..., 8:16]
    y = both_paths(lambda: rotate_thd(t, freqs, cu, None, False, 1, 0, False))
    i, j, angle = t[..., :4], t[..., 4:8], freqs[:, 0]
    first = i * angle[..., :4].cos() - j * angle[..., :4].sin()
    second = j * angle[..., 4:].cos() + i * angle[..., 4:].sin()
    torch.testing.assert_close(y[..., :8], torch.cat([first, second], -1))
    assert same_bits(y[..., 8:], t[..., 8:])
    with pytest.raises(ValueError, match=r"freqs has d2 = 128 .* at most d = 64"):
        apply_rotary_pos_emb_thd(t, random_table(9, 128, device), cu)


@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_k17_odd_rotary_width_is_refused(device: torch.device, interleaved: bool) -> None:
    """Its pairs are not defined, and the last one would reach past the row."""
    memory = torch.full((64,), 7.0, device=device)
    t, freqs = memory[:5].view(1, 1, 5), torch.zeros(1, 1, 1, 5, device=device)
    with pytest.raises(ValueError, match=r"freqs has d2 = 5 .*must be even"):
        apply_rotary_pos_emb_thd(t, freqs, boundaries([0, 1], device), interleaved=interleaved)
    assert (memory == 7.0).all()
    function = router.make_routed(original, False, Format.THD, router.RouterState())
    with pytest.raises(ValueError, match=r"freqs has d2 = 5 .*must be even"):
        function(*routed_arguments(freqs=random_table(16, 5), interleaved=interleaved))


def test_k21_fragments_keep_their_offset_in_both_directions(
    device: torch.device, both_paths: BothPaths
) -> None:
    freqs, cu = random_table(8, 8, device), boundaries([0, 2, 4], device)
    t, starts = randn(4, 2, 8, device=device), boundaries([2, 6], device)
    whole = randn(8, 2, 8, device=device)
    for x, transpose in ((t, False), (t, True)):
        y = both_paths(
            lambda x=x, transpose=transpose: rotate_thd(
                x, freqs, cu, starts, False, 1, 0, transpose
            )
        )
        whole[[2, 3, 6, 7]] = x
        one = boundaries([0, 8], device)
        expected = rotate_thd(whole, freqs, one, None, False, 1, 0, transpose)
        assert same_bits(y, expected[[2, 3, 6, 7]])
    with pytest.raises(ValueError, match=r"start_positions has shape \[\]; it must be 1-D"):
        apply_rotary_pos_emb_thd(t, freqs, cu, start_positions=starts[0])
    with pytest.raises(TypeError, match=r"start_positions has dtype torch.int64"):
        apply_rotary_pos_emb_thd(t, freqs, cu, start_positions=starts.long())


@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("transpose", [False, True])
def test_k24_every_rank_has_its_rows_of_the_whole(
    device: torch.device, cp_size: int, transpose: bool, both_paths: BothPaths
) -> None:
    cu = boundaries([0, 16, 16, 64, 176], device)
    t, freqs = randn(176, 2, 12, device=device), random_table(112, 8, device)
    shards = [
        both_paths(
            lambda rank=rank: rotate_thd(
                split_for_rank(t, cu, cp_size, rank), freqs, cu, None, False, cp_size, rank,
                transpose,
            )
        )
        for rank in range(cp_size)
    ]  # fmt: skip
    whole = rotate_thd(t, freqs, cu, None, False, 1, 0, transpose)
    assert same_bits(merge_ranks(shards, cu), whole)


@pytest.mark.parametrize("shape", [(8, 2, 1, 8), (8, 3, 1, 8), (8, 1, 2, 8)])
def test_k28_table_of_several_samples_is_never_reshaped(
    device: torch.device, shape: tuple[int, ...]
) -> None:
    freqs = randn(*shape, device=device)
    with pytest.raises(ValueError, match=r"freqs has shape .*must be \[s, 1, 1, d2\]"):
        apply_rotary_pos_emb_thd(randn(8, 2, 8, device=device), freqs, boundaries([0, 8], device))
    function = router.make_routed(original, False, Format.THD, router.RouterState())
    with pytest.raises(OriginalCalledError):  # TransformerEngine's error is the one to see
        function(*routed_arguments(freqs=freqs.cpu()))


def test_k32_int64_metadata_are_refused_not_misread(device: torch.device) -> None:
    t, freqs = randn(8, 2, 8, device=device), random_table(8, 8, device)
    offsets = torch.tensor([4, 4], device=device).cumsum(0)
    cu = torch.cat([offsets.new_zeros(1), offsets])
    assert cu.dtype == torch.int64  # as cumsum makes it
    with pytest.raises(TypeError, match=r"cu_seqlens has dtype torch.int64.*to\(torch.int32\)"):
        apply_rotary_pos_emb_thd(t, freqs, cu)
    y = apply_rotary_pos_emb_thd(t, freqs, cu.to(torch.int32))
    assert (y != 0).any(dim=(1, 2)).all()


@pytest.mark.parametrize("order", ["torch, overlay", "overlay, torch"])
def test_p01_imports_in_any_order(order: str) -> None:
    names = order.replace("overlay", "transformer_engine_overlay as overlay")
    code = f"import sys\nimport {names}\n"
    code += "print(overlay.status().enabled, 'transformer_engine' in sys.modules)"
    assert run_python(code).stdout.split() == ["False", "False"]


def extension() -> bytes:
    assert _native.__file__ is not None
    return Path(_native.__file__).read_bytes()


def test_p02_extension_is_bound_to_no_torch() -> None:
    """No symbol and no library of torch in it, so that no other torch can lack one."""
    data = extension()
    for name in (b"_ZN3c10", b"_ZN2at", b"_ZNK3c10", b"libtorch", b"libc10", b"nvte_"):
        assert name not in data
    assert b"PyObject_Vectorcall" in data  # names of symbols are to be seen in it


def test_p09_extension_loads_no_cuda_runtime() -> None:
    """It has its own, linked statically: torch's stays the only one that is loaded."""
    assert b"libcudart" not in extension()
    assert b"libc.so" in extension()  # names of libraries are to be seen in it


def test_p09_import_needs_no_toolkit() -> None:
    """No nvcc, and a CUDA_HOME that leads nowhere."""
    code = (
        "import torch, transformer_engine_overlay as overlay\n"
        "y = overlay.apply_rotary_pos_emb_thd(torch.ones(1, 1, 2), torch.zeros(1, 1, 1, 2), "
        "torch.tensor([0, 1], dtype=torch.int32))\n"
        "print(y.tolist())"
    )
    assert (
        run_python(code, PATH="", CUDA_HOME="/nowhere", CUDA_PATH="/nowhere").stdout
        == "[[[1.0, 1.0]]]\n"
    )


KINDS = (
    "K01 K02 K03 K04 K06 K07 K08 K10 K11 K13 K14 K15 K16 K17 K18 K19 K21 K22 K23 K24 K26 K27 K28 "
    "K29 K30 K31 K32 K33 K35 K36 K37 K38 K40 K41 P01 P02 P03 P04 P05 P06 P08 P09 P10 P13 P14"
)


def functions_of(folder: Path) -> set[str]:
    """Every test below a folder, as file::Class::function."""
    found = set()
    for file in folder.rglob("test_*.py"):
        name = file.relative_to(folder).as_posix()
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{name}::{node.name}" if isinstance(node, ast.ClassDef) else name
            found |= {f"{prefix}::{f.name}" for f in inside if isinstance(f, ast.FunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


def ids_of(test: str) -> set[str]:
    return {x.upper() for x in re.findall(r"_([kp]\d\d)(?=_)", test.rpartition("::")[2])}


def test_kinds_and_tests_fit() -> None:
    folder = Path(__file__).parent
    text = (folder / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([KP]\d\d) \| [^|]+ \| (.*::.*) \|$", text, re.MULTILINE))
    assert list(rows) == KINDS.split()
    tests = functions_of(folder)
    for kind, cell in rows.items():
        named = set(re.findall(r"`([^`]+)`", cell))
        assert named <= tests, kind
        # Those whose names carry the id, all of them and no other.
        assert named == {test for test in tests if kind in ids_of(test)}, kind
    assert set().union(*map(ids_of, tests)) <= set(rows)
