# SPDX-License-Identifier: Apache-2.0
"""Checked mode: metadata that do not fit raise before a launch, and all else is as without it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from packed import boundaries, randn, random_table
from stub_fixtures import NAMES, Format, OriginalCalledError, expected, original, thd_arguments

import transformer_engine_overlay as overlay
from transformer_engine_overlay import apply_rotary_pos_emb_thd, checked, path_counts, router
from transformer_engine_overlay.thd import rotate_thd
from transformer_engine_overlay.verify import same_bits

VARIABLE = "TE_OVERLAY_CHECK"
PATH_VARIABLE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"


# What a value of the variable does to a call that is wrong, direct or routed. The native module
# decides who is asked, checked.py what is meant.
VALUES = {
    None: "runs",
    "0": "runs",
    "1": "is checked",
    **dict.fromkeys(
        ("", "2", "-1", "00", "01", "0 ", " 1", "1\n", "on", "off", "true", "\u0661", "\udcff"),
        "is refused",
    ),
}
IN_TURN = (None, "1", "0", "on", None, "1", None)


def set_variable(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, value)


def outcome_of(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return "is refused" if str(error).startswith(f"{VARIABLE} is ") else "is checked"
    return "runs"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


# tokens, cu_seqlens, start_positions, (cp_size, cp_rank), table rows, message
BAD: dict[str, tuple[int, list[int], list[int] | None, tuple[int, int], int, str]] = {
    "short table": (
        *(10, [0, 10], None, (1, 0), 8),
        r"sequence 0 has length 10, cu_seqlens\[0\] = 0 to cu_seqlens\[1\] = 10; it uses position "
        r"9 on cp_rank 0 of cp_size 1, but freqs has 8 rows. It must have at least 10",
    ),
    "table one row short": (8, [0, 8], None, (1, 0), 7, r"position 7 .* freqs has 7 rows"),
    "no table": (1, [0, 1], None, (1, 0), 0, r"position 0 .* freqs has 0 rows"),
    "table short for the start": (
        *(9, [0, 3, 9], [0, 5], (1, 0), 8),
        r"sequence 1 has length 6, .* it uses position 10 with start position 5 on .* has 8 rows. "
        r"It must have at least 11",
    ),
    "start past 31 bits": (6, [0, 6], [2**31 - 1], (1, 0), 8, r"uses position 2147483652 with"),
    "table of the local length": (
        *(8, [0, 16], None, (2, 0), 8),
        r"length 16, .* position 15 on cp_rank 0 of cp_size 2, .* at least 16 for this batch, "
        r"which is the length of the whole sequences, not of a rank's share",
    ),
    # chunks of 4: rank 1 holds positions 4 to 7 and 8 to 11
    "table of the local length, rank 1": (
        *(8, [0, 16], None, (2, 1), 8),
        r"position 11 on cp_rank 1 of cp_size 2",
    ),
    "start under context parallelism": (
        *(8, [0, 16], [5], (2, 1), 16),
        r"position 16 with start position 5 on cp_rank 1",
    ),
    "several": (
        *(30, [0, 2, 12, 20, 30], None, (1, 0), 4),
        r"sequence 1 \(and 2 more like it\) has length 10",
    ),
    "negative start": (
        *(6, [0, 2, 6], [3, -2], (1, 0), 8),
        r"sequence 1 has length 4, .* start_positions\[1\] is -2, and it must not be negative",
    ),
    "unpadded": (
        *(14, [0, 4, 12, 18, 28], None, (2, 1), 64),
        r"sequence 2 has length 6, cu_seqlens\[2\] = 12 to cu_seqlens\[3\] = 18; with cp_size=2 "
        r"each boundary must be divisible by 2 \* cp_size = 4. Is cu_seqlens unpadded with "
        r"cp_size=2\? Pass the boundaries of the padded batch",
    ),
    "even shares": (174, [0, 698], None, (4, 1), 704, r"length 698, .* 2 \* cp_size = 8"),
    "odd length": (3, [0, 7], None, (2, 0), 16, r"length 7, .* Is cu_seqlens unpadded with cp_siz"),
    "divisible lengths behind one that is not": (
        *(6, [0, 2, 6, 10], None, (2, 0), 16),
        r"sequence 0 \(and 2 more like it\) has length 2",
    ),
    "share that rounds to nothing": (
        *(2, [0, 2], None, (8, 3), 16),
        r"length 2, .* its share rounds to nothing on cp_rank 3 and all others",
    ),
    "decreasing": (
        *(12, [0, 9, 4, 12], None, (1, 0), 16),
        r"sequence 1 has length -5, cu_seqlens\[1\] = 9 to cu_seqlens\[2\] = 4; .* not decrease",
    ),
    "zeros behind the end": (
        *(12, [0, 12, 0, 0], None, (1, 0), 16),
        r"sequence 1 has length -12, .* Repeat its last boundary instead",
    ),
    "negative boundary": (12, [0, -8, 12], None, (1, 0), 16, r"sequence 0 has length -8"),
    "first boundary": (
        9,
        [3, 9],
        None,
        (1, 0),
        16,
        r"cu_seqlens\[0\] is 3; it must be 0: .*cumsum",
    ),
    "negative first boundary": (9, [-4, 9], None, (1, 0), 16, r"cu_seqlens\[0\] is -4"),
    "no sequence": (4, [2], None, (1, 0), 16, r"cu_seqlens\[0\] is 2"),
    "more rows than there are": (
        *(10, [0, 4, 50], None, (1, 0), 64),
        r"sequence 1 has length 46, .* its rows go up to 49 on cp_rank 0 of cp_size 1, but t has "
        r"10 rows. It must have at least cu_seqlens\[-1\] // cp_size = 50: are cu_seqlens and t of",
    ),
    "more rows than a rank has": (
        *(7, [0, 16], None, (2, 1), 64),
        r"rows go up to 7 on cp_rank 1 of cp_size 2, but t has 7 rows",
    ),
    "boundary past 31 bits of rows": (12, [0, 2**31 - 1], None, (1, 0), 16, r"up to 2147483646 on"),
}

# The same columns, without a message: what is unusual, and yet right.
GOOD: dict[str, tuple[int, list[int], list[int] | None, tuple[int, int], int]] = {
    "table exactly as long": (10, [0, 4, 10], None, (1, 0), 6),
    "start up to the last row": (6, [0, 6], [2], (1, 0), 8),
    "rank 1 needs less of the table": (8, [0, 16], None, (2, 1), 12),
    "tail rows": (20, [0, 4, 10], None, (1, 0), 6),
    "tail rows of a rank": (9, [0, 16], None, (2, 0), 16),
    "empty sequences, whose starts are not used": (5, [0, 0, 3, 5, 5], [-9, 0, 3, 999], (1, 0), 8),
    "fixed number of boundaries": (12, [0, 5, 9, 9, 9], None, (1, 0), 8),
    "no sequence": (4, [0], None, (1, 0), 8),
    "no rows": (0, [0, 0], None, (1, 0), 0),
    "padded": (16, [0, 4, 12, 20, 32], None, (2, 1), 12),
    "704": (176, [0, 704], None, (4, 3), 704),
    "further starts": (5, [0, 5], [1, -7, 2**31 - 1], (1, 0), 8),
}


def arguments(
    tokens: int, cu: list[int], starts: list[int] | None, table_rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return (
        randn(tokens, 2, 10, device=device),
        random_table(table_rows, 8, device),
        boundaries(cu, device),
        None if starts is None else boundaries(starts, device),
    )


class TestTorchApi:
    @pytest.mark.usefixtures("check")
    @pytest.mark.parametrize("transpose", [False, True])
    @pytest.mark.parametrize("name", BAD)
    def test_raises_before_a_launch(self, device: torch.device, name: str, transpose: bool) -> None:
        tokens, cu, starts, cp, table_rows, message = BAD[name]
        t, freqs, cu_tensor, start = arguments(tokens, cu, starts, table_rows, device)
        before = path_counts()
        with pytest.raises(ValueError, match=message.replace("but t ", "but (t|grad_output) ")
                           .replace("and t ", "and (t|grad_output) ")):  # fmt: skip
            rotate_thd(t, freqs, cu_tensor, start, False, *cp, transpose)
        assert path_counts() == before

    @pytest.mark.parametrize("name", BAD)
    @pytest.mark.parametrize("value", [None, "0"])
    def test_off_it_is_silent(
        self, name: str, value: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Guards the test above: without checked mode nothing is raised."""
        set_variable(monkeypatch, value)
        tokens, cu, starts, cp, table_rows, _ = BAD[name]
        t, freqs, cu_tensor, start = arguments(tokens, cu, starts, table_rows, torch.device("cpu"))
        assert rotate_thd(t, freqs, cu_tensor, start, False, *cp, False).isfinite().all()

    @pytest.mark.parametrize("name", GOOD)
    def test_good_metadata_give_the_same_bits(
        self, device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokens, cu, starts, cp, table_rows = GOOD[name]
        t, freqs, cu_tensor, start = arguments(tokens, cu, starts, table_rows, device)
        plain = rotate_thd(t, freqs, cu_tensor, start, True, *cp, False)
        monkeypatch.setenv(VARIABLE, "1")
        assert same_bits(rotate_thd(t, freqs, cu_tensor, start, True, *cp, False), plain)

    @pytest.mark.usefixtures("check")
    def test_k22_unpadded_boundaries_are_refused_on_every_rank(self, device: torch.device) -> None:
        for cp_rank in range(2):
            t, freqs, cu, _ = arguments(14, [0, 4, 12, 18, 28], None, 64, device)
            with pytest.raises(ValueError, match="unpadded with cp_size=2") as raised:
                apply_rotary_pos_emb_thd(t, freqs, cu, cp_size=2, cp_rank=cp_rank)
            assert "sequence 2 has length 6" in str(raised.value)

    @pytest.mark.usefixtures("check")
    @pytest.mark.parametrize(
        ("length", "cp_size"), [(7, 2), (2, 8), (698, 4), (12, 8), (1, 2), (6, 2)]
    )
    def test_k23_lengths_that_do_not_divide_are_refused(
        self, device: torch.device, length: int, cp_size: int
    ) -> None:
        t, freqs, cu, _ = arguments(length // cp_size, [0, length], None, length, device)
        with pytest.raises(ValueError, match=rf"has length {length}, .*= {2 * cp_size}"):
            apply_rotary_pos_emb_thd(t, freqs, cu, cp_size=cp_size)

    @pytest.mark.usefixtures("check")
    def test_k26_table_that_ends_early_is_refused(self, device: torch.device) -> None:
        for tokens, cu, starts, cp in (
            (10, [0, 10], None, (1, 0)),
            (8, [0, 16], None, (2, 0)),
            (6, [0, 6], [5], (1, 0)),
        ):
            with pytest.raises(ValueError, match=r"uses position \d+ .*freqs has 8 rows"):
                rotate_thd(*arguments(tokens, cu, starts, 8, device), False, *cp, False)

    @pytest.mark.usefixtures("check")
    def test_gradient_is_checked_by_its_name(self, device: torch.device) -> None:
        t, freqs, cu, _ = arguments(10, [0, 10], None, 16, device)
        y = apply_rotary_pos_emb_thd(t.requires_grad_(), freqs, cu)
        y.sum().backward()
        with pytest.raises(ValueError, match="but grad_output has 9 rows"):
            rotate_thd(t[:9], freqs, cu, None, False, 1, 0, True)

    @pytest.mark.usefixtures("check")
    def test_wrong_types_are_the_errors_as_ever(self, device: torch.device) -> None:
        t, freqs, cu, _ = arguments(10, [0, 10], None, 16, device)
        with pytest.raises(TypeError, match=r"cu_seqlens has dtype torch.int64"):
            apply_rotary_pos_emb_thd(t, freqs, cu.long())

    @pytest.mark.parametrize("value", ["yes", "", "2", "01"])
    def test_another_value_is_named(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(ValueError, match=f"{VARIABLE} is '{value}'; it must be 1 .*, 0 or"):
            rotate_thd(*arguments(10, [0, 10], None, 16, torch.device("cpu")), False, 1, 0, False)

    def test_is_read_at_each_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        args = arguments(10, [0, 10], None, 8, torch.device("cpu"))
        for value in IN_TURN:
            set_variable(monkeypatch, value)
            assert outcome_of(lambda: rotate_thd(*args, False, 1, 0, False)) == VALUES[value]


class TestRouted:
    """Routed calls, of functions that were made before the variable was set."""

    @pytest.fixture
    def unchecked(self) -> Callable[..., torch.Tensor]:
        return router.make_routed(original, False, Format.THD, router.RouterState())

    @pytest.fixture
    def routed(
        self, unchecked: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., torch.Tensor]:
        monkeypatch.setenv(VARIABLE, "1")
        return unchecked

    def arguments(self, name: str, table: dict[str, Any]) -> list[Any]:
        tokens, cu, starts, cp, table_rows = table[name][:5]
        t, freqs, cu_tensor, start = arguments(tokens, cu, starts, table_rows, torch.device("cpu"))
        return [t, freqs, start, Format.THD, False, cu_tensor, *cp]

    @pytest.mark.parametrize("name", BAD)
    def test_raises_before_a_launch(self, routed: Callable[..., Any], name: str) -> None:
        before = path_counts()
        message = BAD[name][5].replace("but t ", "but input ").replace("and t ", "and input ")
        with pytest.raises(ValueError, match=message):
            routed(*self.arguments(name, BAD))
        assert path_counts() == before

    @pytest.mark.parametrize("name", [name for name in GOOD if GOOD[name][0]])
    def test_good_metadata_are_routed(self, routed: Callable[..., Any], name: str) -> None:
        args = self.arguments(name, GOOD)
        t, freqs, start, _, interleaved, cu, *cp = args
        before = path_counts()["token_linear"]
        y = routed(*args)
        after = path_counts()["token_linear"]
        ran = int(len(cu) > 1)
        assert after["routed"] - before["routed"] == ran
        assert after["calls"] - before["calls"] == ran
        assert same_bits(y, rotate_thd(t, freqs, cu, start, interleaved, *cp, False))

    @pytest.mark.parametrize("value", VALUES)
    def test_values_mean_what_they_mean_to_direct_calls(
        self,
        unchecked: Callable[..., torch.Tensor],
        value: str | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        args = self.arguments("short table", BAD)
        t, freqs, start, _, interleaved, cu, *cp = args
        set_variable(monkeypatch, value)
        outcomes = [
            outcome_of(lambda: rotate_thd(t, freqs, cu, start, interleaved, *cp, False)),
            outcome_of(lambda: unchecked(*args)),
        ]
        assert outcomes == [VALUES[value]] * 2

    def test_is_read_at_each_call(
        self, unchecked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        args = self.arguments("short table", BAD)
        for value in IN_TURN:
            set_variable(monkeypatch, value)
            assert outcome_of(lambda: unchecked(*args)) == VALUES[value]

    @pytest.mark.parametrize("value", [None, "0"])
    def test_off_it_costs_a_plain_call_no_python(
        self,
        unchecked: Callable[..., Any],
        value: str | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("the way by Python was taken")

        set_variable(monkeypatch, value)
        monkeypatch.setattr(router, "rotate_checked", fail)
        args = self.arguments("tail rows", GOOD)
        unchecked(*args)
        monkeypatch.setenv(VARIABLE, "1")
        with pytest.raises(AssertionError, match="the way by Python"):
            unchecked(*args)

    def test_calls_of_others_pass_unlooked_at(
        self, routed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        args = self.arguments("short table", BAD)
        for spoiled in (
            [*args[:3], Format.SBHD, *args[4:]],
            [args[0].double(), *args[1:]],
            args[:7],
        ):
            with pytest.raises(OriginalCalledError):
                routed(*spoiled)
        with pytest.raises(OriginalCalledError):
            routed(*args[:7], cp_rank=0)
        monkeypatch.setenv(PATH_VARIABLE, "0")  # TransformerEngine's own dispatch
        with pytest.raises(OriginalCalledError):
            routed(*args)

    def test_switched_off_passes(self, check: None) -> None:
        state = router.RouterState()
        function = router.make_routed(original, False, Format.THD, state)
        state.active = False
        with pytest.raises(OriginalCalledError):
            function(*self.arguments("short table", BAD))

    @pytest.mark.parametrize("name", NAMES)
    def test_through_te(self, te: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set behind enable(), as in a notebook that looks for a mistake."""
        overlay.enable(strict=True)
        tex = sys.modules["transformer_engine_torch"]
        args = list(thd_arguments())
        transpose = name == "fused_rope_backward"
        monkeypatch.setenv(VARIABLE, "1")
        assert same_bits(getattr(tex, name)(*args), expected(transpose))
        args[5] = boundaries([0, 3, 9])
        word = "output_grads" if transpose else "input"
        with pytest.raises(ValueError, match=f"sequence 1 has length 6.*{word} has 8 rows"):
            getattr(tex, name)(*args)
        assert overlay.status().enabled
        with monkeypatch.context() as patch:
            patch.delenv(VARIABLE)
            getattr(tex, name)(*args)
        overlay.disable()
        with pytest.raises(tex.OriginalCalled):
            getattr(tex, name)(*args)


class TestCapture:
    def test_is_skipped_with_one_warning(
        self, check: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A graph cannot be captured on the CPU, so the branch is driven by hand."""
        monkeypatch.setattr(checked, "_warned_of_capture", False)
        with pytest.warns(RuntimeWarning, match=f"{VARIABLE}=1 checks nothing while a CUDA graph"):
            checked._warn_of_capture()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checked._warn_of_capture()

    @pytest.mark.gpu
    def test_on_a_gpu(self, check: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checked, "_warned_of_capture", False)
        t, freqs, cu, _ = arguments(12, [0, 5, 12], None, 16, torch.device("cuda"))
        expected = apply_rotary_pos_emb_thd(t, freqs, cu)
        graph = torch.cuda.CUDAGraph()
        with pytest.warns(RuntimeWarning, match="while a CUDA graph"), torch.cuda.graph(graph):
            captured = apply_rotary_pos_emb_thd(t, freqs, cu)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(captured, expected)
        with pytest.raises(ValueError, match="freqs has 4 rows"):
            apply_rotary_pos_emb_thd(t, freqs[:4], cu)
