# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's RoPE under torch.compile: with the overlay, THD calls stay in the graph."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # as TransformerEngine does
from packed import DTYPES, boundaries, randn, random_table
from te_stub import COMPUTING

import transformer_engine_overlay as overlay
from transformer_engine_overlay import dynamo, patching, path_counts
from transformer_engine_overlay.verify import same_bits

PATH_VARIABLE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"
FREQS = random_table(64, 8)
CU = boundaries([0, 4, 16])


@pytest.fixture(scope="session")
def binding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the stub's extension with the pybind11 that torch ships."""
    file = tmp_path_factory.mktemp("binding") / "transformer_engine_torch.so"
    compiler = shutil.which("c++") or pytest.skip("there is no C++ compiler")
    folders = [Path(torch.__file__).parent / "include", Path(sysconfig.get_paths()["include"])]
    subprocess.run(
        [
            *(compiler, "-shared", "-fPIC", "-std=c++17", *(f"-I{folder}" for folder in folders)),
            *(str(Path(__file__).parent / "te_binding.cpp"), "-o", str(file)),
        ],
        check=True,
    )
    return file


@pytest.fixture(params=["builtin", pytest.param("pybind11", marks=pytest.mark.slow)])
def rope(
    request: pytest.FixtureRequest, stub: Callable[..., None]
) -> Iterator[Callable[..., torch.Tensor]]:
    """``apply_rotary_pos_emb`` of a stub whose functions are as opaque as TransformerEngine's."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    pybind = request.param == "pybind11"
    stub(extension=request.getfixturevalue("binding") if pybind else COMPUTING)
    yield importlib.import_module("transformer_engine.pytorch.attention.rope").apply_rotary_pos_emb
    torch._dynamo.reset()
    # It leaves the modules that it met in the globals of what it compiled.
    for name in [name for name in globals() if name.startswith("__import_")]:
        del globals()[name]


def original_calls() -> list[str]:
    """Layouts of the calls that reached the stub's own functions."""
    calls: list[str] = importlib.import_module("transformer_engine.rotation").calls
    return calls


def routed_calls() -> int:
    return sum(count["routed"] for count in path_counts().values())


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def surrounded(rope: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A call with something before and after it, for the graph to hold together."""

    def function(t: torch.Tensor, **options: Any) -> torch.Tensor:
        options = {"tensor_format": "thd", "fused": True, "cu_seqlens": CU, **options}
        return rope(t * 2, options.pop("freqs", FREQS), **options) + 1

    return function


def compiled(function: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    # aot_eager: the whole compiled path but code generation, which needs a compiler of its own
    made: Callable[..., torch.Tensor] = torch.compile(function, backend="aot_eager", **options)
    return made


def both_directions(
    function: Callable[..., torch.Tensor], t: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    x = t.clone().requires_grad_()
    y = function(x, **options)
    y.backward(randn(*y.shape, dtype=y.dtype, seed=1))
    assert x.grad is not None
    return y.detach(), x.grad


def assert_same(results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_k38_no_break_where_stock_has_one(
    rope: Callable[..., torch.Tensor], needs_grad: bool
) -> None:
    t = randn(16, 2, 8).requires_grad_(needs_grad)
    stock = torch._dynamo.explain(surrounded(rope))(t)
    with overlay.patched():
        ours = torch._dynamo.explain(surrounded(rope))(t)
    assert stock.graph_break_count >= 1
    assert ours.graph_break_count == 0
    assert ours.graph_count == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"interleaved": True, "start_positions": boundaries([3, 5])},
        {"freqs": FREQS.bfloat16()},  # TransformerEngine converts it, in the graph
        {"freqs": FREQS[..., ::2]},
        {"cp_size": 2, "cp_rank": 1, "cu_seqlens": boundaries([0, 4, 32])},
    ],
    ids=["plain", "starts", "bfloat16 table", "strided table", "context parallel"],
)
def test_bits_are_those_of_eager_calls(
    rope: Callable[..., torch.Tensor], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    t = randn(16, 2, 8, dtype=dtype)
    with overlay.patched():
        expected = both_directions(surrounded(rope), t, **options)
        before = routed_calls()
        results = both_directions(compiled(surrounded(rope), fullgraph=True), t, **options)
        assert routed_calls() == before + 2
    assert_same(results, expected)
    assert original_calls() == []


def test_strided_input_and_gradient(rope: Callable[..., torch.Tensor]) -> None:
    wide = randn(16, 2, 24)

    def function(wide: torch.Tensor) -> torch.Tensor:
        y = surrounded(rope)(wide[..., 8:16])
        return y.sum(0, keepdim=True).expand(16, -1, -1)

    with overlay.patched():
        expected = both_directions(function, wide)
        assert_same(both_directions(compiled(function, fullgraph=True), wide), expected)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_other_layouts_break_as_in_stock(rope: Callable[..., torch.Tensor], layout: str) -> None:
    options = {"tensor_format": layout, "cu_seqlens": None}
    t = randn(16, 16, 2, 8)
    expected = both_directions(surrounded(rope), t, **options)
    stock = torch._dynamo.explain(surrounded(rope))(t, **options)
    with overlay.patched():
        ours = torch._dynamo.explain(surrounded(rope))(t, **options)
        assert ours.graph_break_count == stock.graph_break_count
        del original_calls()[:]
        assert_same(both_directions(compiled(surrounded(rope)), t, **options), expected)
    assert original_calls() == [layout, layout]


def test_what_the_kernels_do_not_cover_reaches_stock_from_the_graph(
    rope: Callable[..., torch.Tensor],
) -> None:
    t = randn(16, 2, 8, dtype=torch.float64)
    expected = both_directions(surrounded(rope), t)
    del original_calls()[:]
    with overlay.patched():
        results = both_directions(compiled(surrounded(rope), fullgraph=True), t)
    assert_same(results, expected)
    assert original_calls() == ["thd", "thd"]


def test_errors_are_those_of_eager_calls(rope: Callable[..., torch.Tensor]) -> None:
    t = randn(16, 2, 8)
    with overlay.patched():
        for function in (surrounded(rope), compiled(surrounded(rope), fullgraph=True)):
            with pytest.raises(TypeError, match=r"cu_seqlens has dtype torch\.int64"):
                function(t, cu_seqlens=CU.long())


@pytest.mark.parametrize("change", ["keyword", "number", "list", "equal format"])
def test_unusual_calls_are_made_as_without_a_graph(
    rope: Callable[..., torch.Tensor], change: str
) -> None:
    tex = sys.modules["transformer_engine_torch"]
    thd = tex.NVTE_QKV_Format.NVTE_THD
    equal = tex.NVTE_QKV_Format(2) if change == "equal format" else thd
    interleaved: Any = 1 if change == "number" else False
    starts: Any = [0, 0] if change == "list" else None
    names = {"cp_rank": 0} if change == "keyword" else {}
    ranks = (1,) if names else (1, 0)

    def function(t: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = tex.fused_rope_forward(
            t * 2, FREQS, starts, equal, interleaved, CU, *ranks, **names
        )
        return result

    def outcome(function: Callable[..., torch.Tensor]) -> Any:
        before = routed_calls(), len(original_calls())
        try:
            result: Any = function(randn(16, 2, 8)).tolist()
        except (AssertionError, TypeError) as error:
            result = type(error)
        return result, routed_calls() - before[0], len(original_calls()) - before[1]

    with overlay.patched():
        assert outcome(compiled(function)) == outcome(function)


def test_path_is_read_when_the_graph_runs(
    rope: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    t = randn(16, 2, 8)
    with overlay.patched():
        function = compiled(surrounded(rope), fullgraph=True)
        both_directions(function, t)
        made = graphs()
        before = path_counts()["token_linear"]["routed"]
        monkeypatch.setenv(PATH_VARIABLE, "1")
        both_directions(function, t)
        assert path_counts()["token_linear"]["routed"] == before + 2
        assert original_calls() == []
        monkeypatch.setenv(PATH_VARIABLE, "0")  # TransformerEngine's own dispatch
        both_directions(function, t)
        assert path_counts()["token_linear"]["routed"] == before + 2
        assert original_calls() == ["thd", "thd"]
        monkeypatch.setenv(PATH_VARIABLE, "on")
        with pytest.raises(ValueError, match=f"{PATH_VARIABLE} is 'on'"):
            both_directions(function, t)
        assert graphs() == made


def test_checks_are_asked_for_when_the_graph_runs(
    rope: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    t, short = randn(16, 2, 8), FREQS[:8]
    monkeypatch.setenv("TE_OVERLAY_ON_FAULT", "ignore")
    monkeypatch.setenv("TE_OVERLAY_CHECK", "0")
    with overlay.patched():
        function = compiled(surrounded(rope), fullgraph=True)
        expected = surrounded(rope)(t, freqs=short)
        assert same_bits(function(t, freqs=short), expected)
        made = graphs()
        monkeypatch.setenv("TE_OVERLAY_CHECK", "1")
        with pytest.raises(ValueError, match=r"position 11 .* but freqs has 8 rows"):
            function(t, freqs=short)
        monkeypatch.setenv("TE_OVERLAY_CHECK", "0")
        assert same_bits(function(t, freqs=short), expected)
        assert graphs() == made


class TestEnabledAndDisabled:
    def test_compiled_before_it_was_enabled(self, rope: Callable[..., torch.Tensor]) -> None:
        t = randn(16, 2, 8)
        function = compiled(surrounded(rope))
        stock = both_directions(function, t)
        assert original_calls() == ["thd", "thd"]
        with overlay.patched():
            before = routed_calls()
            results = both_directions(function, t)
            assert routed_calls() == before + 2
            assert_same(results, both_directions(surrounded(rope), t))
        assert original_calls() == ["thd", "thd"]
        assert_same(both_directions(function, t), stock)
        assert original_calls() == ["thd"] * 4

    def test_compiled_while_enabled(self, rope: Callable[..., torch.Tensor]) -> None:
        tex = sys.modules["transformer_engine_torch"]
        stock = [getattr(tex, name) for name in patching.FUNCTIONS]
        t = randn(16, 2, 8)
        function = compiled(surrounded(rope))
        with overlay.patched():
            expected = both_directions(surrounded(rope), t)
            assert_same(both_directions(function, t), expected)
        assert [getattr(tex, name) for name in patching.FUNCTIONS] == stock
        assert original_calls() == []
        before = routed_calls()
        results = both_directions(function, t)  # compiled anew, on the functions that are back
        assert original_calls() == ["thd", "thd"]
        assert routed_calls() == before
        assert_same(results, both_directions(surrounded(rope), t))

    def test_enabled_again_has_its_graphs_already(self, rope: Callable[..., torch.Tensor]) -> None:
        t = randn(16, 2, 8)
        function = compiled(surrounded(rope), fullgraph=True)
        with overlay.patched():
            expected = both_directions(function, t)
        made = graphs()
        for _ in range(20):  # more than torch.compile is willing to compile a function
            with overlay.patched():
                assert_same(both_directions(function, t), expected)
        assert graphs() == made
        assert original_calls() == []

    def test_disabled_between_forward_and_backward(self, rope: Callable[..., torch.Tensor]) -> None:
        t = randn(16, 2, 8).requires_grad_()
        with overlay.patched():
            y = compiled(surrounded(rope), fullgraph=True)(t)
        y.backward(torch.ones_like(y))
        assert original_calls() == ["thd"]

    def test_given_up_at_run_time(self, rope: Callable[..., torch.Tensor]) -> None:
        t = randn(16, 2, 8)
        function = compiled(surrounded(rope), fullgraph=True)
        with overlay.patched():
            function(t)
            assert patching._installation is not None
            with pytest.warns(RuntimeWarning, match=r"compute capability 7\.0"):
                patching._installation.state.give_up("compute capability 7.0")
            function(t)
            assert original_calls() == ["thd"]
        with overlay.patched():  # tries again, as it does without torch.compile
            function(t)
        assert original_calls() == ["thd"]

    def test_eager_calls_reach_the_builtin(self, rope: Callable[..., torch.Tensor]) -> None:
        tex = sys.modules["transformer_engine_torch"]
        with overlay.patched():
            assert type(tex.fused_rope_forward) is types.BuiltinFunctionType
            assert tex.fused_rope_forward.__self__ is not tex

    def test_a_patch_on_top_is_traced_to_ours(self, rope: Callable[..., torch.Tensor]) -> None:
        tex = sys.modules["transformer_engine_torch"]
        t = randn(16, 2, 8)
        with overlay.patched():
            ours = tex.fused_rope_forward
            expected = surrounded(rope)(t)
            tex.fused_rope_forward = lambda *args: ours(*args) * 1
            assert same_bits(compiled(surrounded(rope), fullgraph=True)(t), expected)
            tex.fused_rope_forward = ours  # for disable() to take out


@pytest.mark.parametrize("needs_grad", [False, True])
def test_token_counts_and_ranks_compile_once(
    rope: Callable[..., torch.Tensor], needs_grad: bool
) -> None:
    with overlay.patched():
        function = compiled(surrounded(rope), fullgraph=True)
        counts = []
        for tokens in (8, 12, 16):
            t = randn(tokens, 2, 8).requires_grad_(needs_grad)
            torch._dynamo.mark_dynamic(t, 0)
            cu = boundaries([0, 8, 4 * tokens])
            for rank in range(4):
                y = function(t, cu_seqlens=cu, cp_size=4, cp_rank=rank)
                assert same_bits(y, surrounded(rope)(t, cu_seqlens=cu, cp_size=4, cp_rank=rank))
            counts.append(graphs())
    assert counts[-1] <= counts[0]
    assert counts[0] <= 2  # the first rank, and any other


@pytest.mark.parametrize("transpose", [False, True])
def test_opcheck(rope: Callable[..., torch.Tensor], transpose: bool) -> None:
    with overlay.patched():
        operator = torch.ops.transformer_engine_overlay.routed_rotate_thd.default
        arguments = (randn(16, 2, 8), FREQS, None, False, CU, 1, 0, transpose)
        torch.library.opcheck(operator, arguments)


def test_operator_has_no_gradient_of_its_own(rope: Callable[..., torch.Tensor]) -> None:
    """As TransformerEngine's binding, whose autograd function stands around it."""
    tex = sys.modules["transformer_engine_torch"]
    thd = tex.NVTE_QKV_Format.NVTE_THD
    t = randn(16, 2, 8).requires_grad_()
    with overlay.patched():
        function = compiled(lambda t: tex.fused_rope_forward(t, FREQS, None, thd, False, CU, 1, 0))
        assert not function(t).requires_grad


def test_without_an_installation_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_routed", {})
    with pytest.raises(RuntimeError, match=r"transformer_engine_overlay\.enable\(\)"):
        torch.ops.transformer_engine_overlay.routed_rotate_thd(
            randn(16, 2, 8), FREQS, None, False, CU, 1, 0, False
        )


def test_a_torch_that_refuses_costs_the_graph_alone(
    rope: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*args: Any, **names: Any) -> Any:
        raise TypeError("no such option")

    monkeypatch.setattr(torch.compiler, "substitute_in_graph", refuse)
    with overlay.patched():
        assert "will end its graphs at THD RoPE calls" in caplog.text
        before = routed_calls()
        compiled(surrounded(rope))(randn(16, 2, 8))
        assert routed_calls() == before + 1
