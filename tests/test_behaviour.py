# SPDX-License-Identifier: Apache-2.0
"""The behaviour table: what each kind of input gives, on both paths, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from packed import DTYPES, PAIRINGS, boundaries, randn, random_table

from transformer_engine_overlay import apply_rotary_pos_emb_thd, path_counts
from transformer_engine_overlay.thd import rotate_thd
from transformer_engine_overlay.verify import same_bits

BothPaths = Callable[..., torch.Tensor]
TRANSPOSES = [False, True]


def rotate(
    t: torch.Tensor,
    freqs: torch.Tensor,
    cu: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    cp: tuple[int, int] = (1, 0),
    interleaved: bool = False,
    transpose: bool = False,
) -> torch.Tensor:
    return rotate_thd(t, freqs, cu, starts, interleaved, *cp, transpose)


class TestTailRows:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("transpose", TRANSPOSES)
    @pytest.mark.parametrize("table_rows", [128, 65536])
    def test_k02_are_zero_and_touch_nothing(
        self,
        device: torch.device,
        dtype: torch.dtype,
        transpose: bool,
        table_rows: int,
        both_paths: BothPaths,
    ) -> None:
        freqs, cu = random_table(table_rows, 8, device), boundaries([0, 40, 90], device)
        t = randn(100, 3, 10, dtype=dtype, device=device)
        clean = both_paths(lambda: rotate(t[:90], freqs, cu, transpose=transpose))
        t[90:] = float("nan")
        y = both_paths(lambda: rotate(t, freqs, cu, transpose=transpose))
        assert same_bits(y[:90], clean)
        assert same_bits(y[90:], torch.zeros_like(y[90:]))  # +0, not -0

    @pytest.mark.parametrize(("cp_size", "cp_rank"), [(2, 0), (2, 1), (4, 3)])
    def test_begin_at_the_share_of_the_rank(
        self, device: torch.device, cp_size: int, cp_rank: int, both_paths: BothPaths
    ) -> None:
        t = torch.full((32 // cp_size + 5, 2, 8), 1.0, device=device)
        y = both_paths(
            lambda: rotate(
                t, random_table(32, 8, device), boundaries([0, 32], device), cp=(cp_size, cp_rank)
            )
        )
        assert (y[: 32 // cp_size] != 0).any(dim=(1, 2)).all()
        assert (y[32 // cp_size :] == 0).all()

    def test_k03_gradient_is_finite_in_recycled_memory(self, device: torch.device) -> None:
        """The gradient rows behind the batch poison t.grad.T @ x if they are left unwritten."""
        t = randn(946, 2, 16, device=device).requires_grad_()
        poison = torch.full_like(t, float("nan"))
        del poison
        y = apply_rotary_pos_emb_thd(
            t, random_table(512, 16, device), boundaries([0, 144, 432, 944], device)
        )
        y.sum().backward()
        assert t.grad is not None
        assert (t.grad[944:] == 0).all()
        assert (t.grad.flatten(1).T @ t.detach().flatten(1)).isfinite().all()

    def test_all_rows(self, device: torch.device, both_paths: BothPaths) -> None:
        t = randn(7, 2, 8, device=device)
        y = both_paths(lambda: rotate(t, random_table(8, 8, device), boundaries([0, 0], device)))
        assert (y == 0).all()


class TestEmpty:
    def test_k06_sequences(self, device: torch.device, both_paths: BothPaths) -> None:
        """Empty sequences change nothing, and each token gets its own sequence's start."""
        t, freqs = randn(2048, 1, 8, device=device), random_table(2100, 8, device)
        with_empty = both_paths(
            lambda: rotate(
                t,
                freqs,
                boundaries([0, 0, 1208, 2048, 2048], device),
                starts=boundaries([9, 0, 3, 9], device),
            )
        )
        without = both_paths(
            lambda: rotate(
                t,
                freqs,
                boundaries([0, 1208, 2048], device),
                starts=boundaries([0, 3], device),
            )
        )
        assert same_bits(with_empty, without)

    @pytest.mark.parametrize("shape", [(0, 4, 64), (5, 0, 64), (5, 4, 0)])
    @pytest.mark.parametrize("cu", [[0, 0], [0]])
    @pytest.mark.parametrize("table_rows", [0, 16])
    def test_k35_tensor(
        self,
        device: torch.device,
        shape: tuple[int, int, int],
        cu: list[int],
        table_rows: int,
        both_paths: BothPaths,
    ) -> None:
        t = torch.zeros(shape, device=device, requires_grad=True)
        freqs = torch.zeros(table_rows, 1, 1, min(64, shape[2]), device=device)
        y = both_paths(lambda: apply_rotary_pos_emb_thd(t, freqs, boundaries(cu, device)), calls=0)
        assert y.shape == shape
        y.sum().backward()
        assert t.grad is not None
        assert t.grad.shape == shape
        _next_call_is_clean(device)

    @pytest.mark.parametrize("transpose", TRANSPOSES)
    def test_batch_of_no_sequence_or_no_table_row(
        self, device: torch.device, transpose: bool, both_paths: BothPaths
    ) -> None:
        t = randn(5, 2, 8, device=device)
        for cu, rows in (([0], 16), ([0, 5], 0)):
            freqs = torch.zeros(rows, 1, 1, 8, device=device)
            y = both_paths(
                lambda cu=cu, freqs=freqs: rotate(
                    t, freqs, boundaries(cu, device), transpose=transpose
                ),
                calls=0,
            )
            assert same_bits(y, torch.zeros_like(y))
        _next_call_is_clean(device)


def _next_call_is_clean(device: torch.device) -> None:
    t = randn(4, 1, 8, device=device)
    y = apply_rotary_pos_emb_thd(t, random_table(4, 8, device), boundaries([0, 4], device))
    assert y.isfinite().all()


class TestSize:
    @pytest.mark.parametrize("table_rows", [2, 4, 64])
    def test_k07_more_sequences_than_a_grid_dimension_holds(
        self, device: torch.device, table_rows: int, both_paths: BothPaths
    ) -> None:
        t, freqs = randn(140_000, 1, 2, device=device), random_table(table_rows, 2, device)
        cu = torch.arange(70_001, dtype=torch.int32, device=device) * 2
        y = both_paths(lambda: rotate(t, freqs, cu))
        # Every sequence has rows 0 and 1, so all of them are one sequence of two with many heads.
        heads = t.reshape(70_000, 2, 2).transpose(0, 1)
        expected = rotate(heads, freqs, boundaries([0, 2], device))
        assert same_bits(y.reshape(70_000, 2, 2).transpose(0, 1), expected)

    def test_k08_offsets_above_32_bits(self, device: torch.device, both_paths: BothPaths) -> None:
        """A view whose rows lie 65,536 elements apart: the last ones are past 2^31."""
        rows, stride, width = 32_770, 65_536, 64
        storage = torch.empty((rows - 1) * stride + width, dtype=torch.bfloat16, device=device)
        t = storage.as_strided((rows, 1, width), (stride, width, 1))
        compact = randn(rows, 1, width, dtype=torch.bfloat16, device=device)
        t.copy_(compact)
        freqs, cu = random_table(rows, width, device), boundaries([0, rows], device)
        assert same_bits(both_paths(lambda: rotate(t, freqs, cu)), rotate(compact, freqs, cu))


def _layouts(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of a contiguous tensor in the layouts that training code produces."""
    tokens, heads, dim = t.shape
    fused = t.new_full((tokens, heads, 3 * dim), float("nan"))
    fused[..., dim : 2 * dim] = t
    reversed_heads = t.transpose(0, 1).contiguous().transpose(0, 1)
    layouts = {
        "fused_qkv": fused[..., dim : 2 * dim],
        "last_stride": t.transpose(1, 2).contiguous().transpose(1, 2),
        "heads_first": reversed_heads,
    }
    for offset in (1, 2, 4):
        buffer = t.new_empty(t.numel() + offset)
        layouts[f"offset_{offset}"] = buffer[offset:].view(t.shape).copy_(t)
    row = heads * dim + 1
    odd = t.new_empty(tokens * row)
    layouts["odd_row_stride"] = odd.as_strided(t.shape, (row, dim, 1)).copy_(t)
    return layouts


class TestLayouts:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("interleaved", PAIRINGS)
    @pytest.mark.parametrize("transpose", TRANSPOSES)
    @pytest.mark.parametrize("rotary_dim", [128, 36])
    def test_k11_k13_any_strides_give_the_contiguous_bits(
        self,
        device: torch.device,
        dtype: torch.dtype,
        interleaved: bool,
        transpose: bool,
        rotary_dim: int,
        both_paths: BothPaths,
    ) -> None:
        t = randn(64, 4, 128, dtype=dtype, device=device)
        freqs, cu = random_table(64, rotary_dim, device), boundaries([0, 30, 64], device)
        options = {"interleaved": interleaved, "transpose": transpose}
        expected = both_paths(lambda: rotate(t, freqs, cu, **options))
        for name, view in _layouts(t).items():
            assert torch.equal(view, t)
            y = both_paths(lambda view=view: rotate(view, freqs, cu, **options))
            assert y.is_contiguous(), name
            assert same_bits(y, expected), name

    @pytest.mark.parametrize("transpose", TRANSPOSES)
    @pytest.mark.parametrize("expanded", [(0, 1, 2), (1,), (0,), (2,)])
    def test_k10_expanded_dimensions(
        self,
        device: torch.device,
        transpose: bool,
        expanded: tuple[int, ...],
        both_paths: BothPaths,
    ) -> None:
        shape = [16, 4, 32]
        small = randn(*(1 if i in expanded else n for i, n in enumerate(shape)), device=device)
        view = small.expand(shape)
        freqs, cu = random_table(16, 32, device), boundaries([0, 16], device)
        y = both_paths(lambda: rotate(view, freqs, cu, transpose=transpose))
        assert same_bits(y, rotate(view.contiguous(), freqs, cu, transpose=transpose))

    def test_k10_gradient_of_a_sum(self, device: torch.device) -> None:
        t = randn(16, 4, 32, device=device).requires_grad_()
        freqs, cu = random_table(16, 32, device), boundaries([0, 16], device)
        apply_rotary_pos_emb_thd(t, freqs, cu).sum().backward()
        expected = rotate(torch.ones(16, 4, 32, device=device), freqs, cu, transpose=True)
        assert t.grad is not None
        assert same_bits(t.grad, expected)

    def test_inputs_are_unchanged(self, device: torch.device, both_paths: BothPaths) -> None:
        t, freqs = randn(16, 4, 32, device=device), random_table(16, 32, device)
        cu, starts = boundaries([0, 7, 16], device), boundaries([1, 0], device)
        inputs = (t, freqs, cu, starts)
        before = [x.clone() for x in inputs]
        both_paths(lambda: rotate(t, freqs, cu, starts=starts))
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))

    def test_memory_around_the_output_is_unchanged(
        self, device: torch.device, monkeypatch: pytest.MonkeyPatch, both_paths: BothPaths
    ) -> None:
        """The output is placed inside of a larger buffer, whose ends must keep their value."""
        shape, margin = (33, 3, 20), 512
        numel = 33 * 3 * 20
        buffer = torch.full((numel + 2 * margin,), 7.0, device=device)
        monkeypatch.setattr(torch, "empty_like", lambda *a, **k: buffer[margin:-margin].view(shape))
        t = randn(*shape, device=device)
        freqs, cu = random_table(8, 14, device), boundaries([0, 3, 30], device)
        both_paths(lambda: rotate(t, freqs, cu).clone())
        assert (buffer[:margin] == 7.0).all()
        assert (buffer[-margin:] == 7.0).all()
        assert not (buffer[margin:-margin] == 7.0).any()


class TestRowsWithoutTableRow:
    """A row whose position is outside of the table is zeros; its neighbours are as ever."""

    @pytest.mark.parametrize(
        ("tokens", "cu", "starts", "cp", "table_rows", "lost"),
        [
            (10, [0, 10], None, (1, 0), 8, [8, 9]),
            (8, [0, 16], None, (2, 0), 8, [4, 5, 6, 7]),
            (8, [0, 16], None, (2, 1), 8, [4, 5, 6, 7]),
            (6, [0, 6], [5], (1, 0), 8, [3, 4, 5]),
            (6, [0, 6], [-2], (1, 0), 8, [0, 1]),
            (6, [0, 6], [-2], (1, 0), 3, [0, 1, 5]),
            (6, [0, 6], [2**31 - 1], (1, 0), 8, range(6)),
            (6, [0, 6], [-(2**31)], (1, 0), 8, range(6)),
            (9, [3, 9], None, (1, 0), 8, [0, 1, 2]),
            (20, [0, 4, 20], None, (1, 0), 4, range(8, 20)),
        ],
    )
    @pytest.mark.parametrize("transpose", TRANSPOSES)
    def test_k26_is_zeros(
        self,
        device: torch.device,
        tokens: int,
        cu: list[int],
        starts: list[int] | None,
        cp: tuple[int, int],
        table_rows: int,
        lost: list[int],
        transpose: bool,
        both_paths: BothPaths,
    ) -> None:
        # The table is a slice of NaN: to read outside of it would be seen.
        wide = torch.full((table_rows + 64, 1, 1, 8), float("nan"), device=device)
        freqs = wide[32 : 32 + table_rows]
        freqs.copy_(random_table(table_rows, 8, device))
        assert freqs.is_contiguous()
        t = torch.ones(tokens, 2, 10, device=device)
        y = both_paths(
            lambda: rotate(
                t,
                freqs,
                boundaries(cu, device),
                starts=None if starts is None else boundaries(starts, device),
                cp=cp,
                transpose=transpose,
            )
        )
        zero = (y == 0).all(dim=2).all(dim=1)
        assert zero.nonzero().flatten().tolist() == list(lost)
        assert y.isfinite().all()

    def test_boundaries_past_the_tensor(self, device: torch.device, both_paths: BothPaths) -> None:
        """Boundaries that promise more rows than there are: the rows there are, and no more."""
        t, freqs = randn(10, 2, 8, device=device), random_table(64, 8, device)
        y = both_paths(lambda: rotate(t, freqs, boundaries([0, 4, 50], device)))
        assert same_bits(y, rotate(t, freqs, boundaries([0, 4, 10], device)))

    @pytest.mark.parametrize(
        "cu",
        [[0, 9, 4, 12], [5, 1, 12], [-8, 6, 12], [0, 2**31 - 1, 12], [0, -(2**31), 12], [12, 0]],
    )
    def test_garbage_boundaries_do_no_harm(self, device: torch.device, cu: list[int]) -> None:
        t, freqs = torch.ones(12, 2, 8, device=device), random_table(16, 8, device)
        for cp in ((1, 0), (2, 1)):
            for path in ("0", "1"):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("NVTE_FUSED_ROPE_THD_TOKEN_LINEAR", path)
                    y = rotate(t, freqs, boundaries(cu, device), cp=cp)
                assert y.isfinite().all()
        _next_call_is_clean(device)


class TestUnpaddedContextParallel:
    """Boundaries not divisible by 2 * cp_size keep TE's numbers."""

    @pytest.mark.parametrize(
        ("cu", "cp", "positions"),
        [
            ([0, 7], (2, 0), [0, 5, 6]),
            ([0, 7], (2, 1), [1, 3, 4]),
            ([0, 698], (4, 1), [*range(87, 174), *range(522, 609)]),
        ],
    )
    def test_k23_rows_use_the_positions_of_te(
        self,
        device: torch.device,
        cu: list[int],
        cp: tuple[int, int],
        positions: list[int],
        both_paths: BothPaths,
    ) -> None:
        t, freqs = randn(len(positions), 2, 8, device=device), random_table(704, 8, device)
        y = both_paths(lambda: rotate(t, freqs, boundaries(cu, device), cp=cp))
        # one sequence a token, started at its position, gives each row the table row expected
        singles = boundaries(range(len(positions) + 1), device)
        expected = rotate(t, freqs, singles, starts=boundaries(positions, device))
        assert same_bits(y, expected)

    def test_share_that_rounds_to_nothing(
        self, device: torch.device, both_paths: BothPaths
    ) -> None:
        t = randn(2, 2, 8, device=device)
        y = both_paths(
            lambda: rotate(t, random_table(16, 8, device), boundaries([0, 2], device), cp=(8, 3))
        )
        assert (y == 0).all()


class TestTable:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("t_dtype", DTYPES)
    def test_k29_other_dtypes_are_converted(
        self,
        device: torch.device,
        dtype: torch.dtype,
        t_dtype: torch.dtype,
        both_paths: BothPaths,
    ) -> None:
        t, cu = randn(16, 2, 8, dtype=t_dtype, device=device), boundaries([0, 16], device)
        freqs = random_table(1900, 8, device).to(dtype)
        starts = boundaries([1857], device)
        y = both_paths(lambda: rotate(t, freqs, cu, starts=starts))
        assert same_bits(y, rotate(t, freqs.float(), cu, starts=starts))

    def test_strided_is_made_contiguous(self, device: torch.device, both_paths: BothPaths) -> None:
        t, cu = randn(16, 2, 8, device=device), boundaries([0, 16], device)
        wide = random_table(32, 24, device)
        for freqs in (
            wide[::2, :, :, 3:11],
            wide[:16, :, :, ::3],
            wide[:1, :, :, :8].expand(16, -1, -1, -1),
        ):
            assert not freqs.is_contiguous()
            y = both_paths(lambda freqs=freqs: rotate(t, freqs, cu))
            assert same_bits(y, rotate(t, freqs.contiguous(), cu))

    def test_strided_metadata_is_made_contiguous(
        self, device: torch.device, both_paths: BothPaths
    ) -> None:
        t, freqs = randn(16, 2, 8, device=device), random_table(32, 8, device)
        cu, starts = (
            boundaries([0, -5, 6, -5, 16], device)[::2],
            boundaries([3, 99, 5], device)[::2],
        )
        y = both_paths(lambda: rotate(t, freqs, cu, starts=starts))
        expected = rotate(t, freqs, cu.contiguous(), starts=starts.contiguous())
        assert same_bits(y, expected)

    def test_further_start_positions_are_not_read(self, device: torch.device) -> None:
        t, freqs = randn(16, 2, 8, device=device), random_table(32, 8, device)
        cu = boundaries([0, 6, 16], device)
        y = rotate(t, freqs, cu, starts=boundaries([3, 5, 99, -7], device))
        assert same_bits(y, rotate(t, freqs, cu, starts=boundaries([3, 5], device)))

    def test_k01_cost_follows_tokens_not_table(self, device: torch.device) -> None:
        """The blocks of the token-linear path do not depend on table rows or sequences."""
        blocks = []
        for rows, cu in ((128, [0, 128]), (65536, [0, 128]), (65536, list(range(0, 129, 2)))):
            before = path_counts()["token_linear"]["blocks"]
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("NVTE_FUSED_ROPE_THD_TOKEN_LINEAR", "1")
                rotate(
                    randn(128, 2, 8, device=device),
                    random_table(rows, 8, device),
                    boundaries(cu, device),
                )
            blocks.append(path_counts()["token_linear"]["blocks"] - before)
        assert len(set(blocks)) == 1


class TestSingleHead:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_k27_equals_the_same_head_of_many(
        self, device: torch.device, dtype: torch.dtype, both_paths: BothPaths
    ) -> None:
        t = randn(57, 16, 64, dtype=dtype, device=device)
        freqs, cu = random_table(64, 64, device), boundaries([0, 20, 57], device)
        many = both_paths(lambda: rotate(t, freqs, cu))
        for head in (0, 7, 15):
            one = both_paths(lambda head=head: rotate(t[:, head : head + 1], freqs, cu))
            assert same_bits(one, many[:, head : head + 1])
