# SPDX-License-Identifier: Apache-2.0
"""Enable, disable, status, and the gate, against a stub whose functions raise."""

from __future__ import annotations

import copy
import importlib
import logging
import pickle
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from stub_fixtures import NAMES, expected, forget_te, thd_arguments

import transformer_engine_overlay as overlay
from transformer_engine_overlay import _native, patching
from transformer_engine_overlay.verify import same_bits


class TestEnable:
    def test_p01_before_te_is_imported(self, stub: Callable[..., None]) -> None:
        stub()
        assert "transformer_engine" not in sys.modules
        assert overlay.enable(strict=True)
        from transformer_engine.pytorch import rope  # type: ignore[import-not-found]

        assert same_bits(rope.forward(*thd_arguments()), expected())

    def test_p01_after_te_and_its_callers_were_imported(self, te: ModuleType) -> None:
        imported_before = te.forward
        assert overlay.enable(strict=True)
        assert same_bits(imported_before(*thd_arguments()), expected())
        assert same_bits(te.rope.backward(*thd_arguments()), expected(transpose=True))

    def test_rebinds_the_aliases(self, te: ModuleType) -> None:
        overlay.enable(strict=True)
        tex = sys.modules["transformer_engine_torch"]
        for name in NAMES:
            assert getattr(te.cpp_extensions, name) is getattr(tex, name)
        assert same_bits(te.cpp_extensions.fused_rope_forward(*thd_arguments()), expected())

    def test_without_it_the_stub_raises(self, te: ModuleType) -> None:
        with pytest.raises(sys.modules["transformer_engine_torch"].OriginalCalled):
            te.forward(*thd_arguments())

    def test_twice_is_once(self, te: ModuleType) -> None:
        tex = sys.modules["transformer_engine_torch"]
        originals = {name: getattr(tex, name) for name in NAMES}
        overlay.enable(strict=True)
        once = {name: getattr(tex, name) for name in NAMES}
        overlay.enable(strict=True)
        assert {name: getattr(tex, name) for name in NAMES} == once
        overlay.disable()
        assert all(getattr(tex, name) is originals[name] for name in NAMES)

    def test_disable_restores_the_identical_objects(self, te: ModuleType) -> None:
        tex = sys.modules["transformer_engine_torch"]
        sites = [(module, name) for module in (tex, te.cpp_extensions) for name in NAMES]
        before = [getattr(module, name) for module, name in sites]
        for _ in range(2):
            overlay.enable(strict=True)
            now = [getattr(module, name) for module, name in sites]
            assert all(a is not b for a, b in zip(now, before, strict=True))
            overlay.disable()
            now = [getattr(module, name) for module, name in sites]
            assert all(a is b for a, b in zip(now, before, strict=True))
        overlay.disable()  # once more does nothing

    def test_alias_made_while_enabled_is_restored(self, te: ModuleType) -> None:
        overlay.enable(strict=True)
        importlib.reload(te.cpp_extensions)
        overlay.disable()
        tex = sys.modules["transformer_engine_torch"]
        assert te.cpp_extensions.fused_rope_forward is tex.fused_rope_forward

    def test_foreign_alias_is_left_alone(self, te: ModuleType) -> None:
        foreign = te.cpp_extensions.fused_rope_forward = lambda *args: "foreign"
        overlay.enable(strict=True)
        assert te.cpp_extensions.fused_rope_forward is foreign
        overlay.disable()
        assert te.cpp_extensions.fused_rope_forward is foreign

    def test_puts_ours_back_where_somebody_put_the_original(self, te: ModuleType) -> None:
        tex = sys.modules["transformer_engine_torch"]
        original = tex.fused_rope_forward
        overlay.enable(strict=True)
        tex.fused_rope_forward = original
        assert not overlay.status().enabled
        assert overlay.enable(strict=True)
        assert overlay.status().enabled
        assert same_bits(te.forward(*thd_arguments()), expected())

    def test_te_imported_anew(self, te: ModuleType) -> None:
        overlay.enable(strict=True)
        forget_te()
        again = importlib.import_module("transformer_engine.pytorch")
        assert overlay.enable(strict=True)
        assert set(overlay.status().sites.values()) == {"routed"}
        assert same_bits(again.forward(*thd_arguments()), expected())
        overlay.disable()
        with pytest.raises(sys.modules["transformer_engine_torch"].OriginalCalled):
            again.forward(*thd_arguments())

    def test_refusal_is_forgotten_after_success(
        self, te: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(_native, "WITH_CUDA", False)
            assert not overlay.enable()
        assert "built without CUDA" in overlay.status().problem
        assert overlay.enable()
        assert overlay.status().problem == ""

    def test_what_gave_up_stays_off(self, te: ModuleType) -> None:
        overlay.enable(strict=True)
        assert patching._installation is not None
        with pytest.warns(RuntimeWarning, match=r"compute capability 7\.0"):
            patching._installation.state.give_up("compute capability 7.0")
        with pytest.raises(overlay.OverlayError, match=r"compute capability 7\.0"):
            overlay.enable(strict=True)
        assert overlay.status().problem == "compute capability 7.0"
        assert not overlay.status().enabled

    def test_names_and_documentation_stay(self, te: ModuleType) -> None:
        tex = sys.modules["transformer_engine_torch"]
        doc = tex.fused_rope_forward.__doc__
        overlay.enable(strict=True)
        assert tex.fused_rope_forward.__name__ == "fused_rope_forward"
        assert tex.fused_rope_forward.__doc__ == doc

    @pytest.mark.parametrize("name", NAMES)
    def test_functions_are_pickled_by_name(self, te: ModuleType, name: str) -> None:
        """As the originals are: what comes out is what is in place where it comes out."""
        tex = sys.modules["transformer_engine_torch"]
        pickled = pickle.dumps(getattr(tex, name))
        overlay.enable(strict=True)
        assert pickle.dumps(getattr(tex, name)) == pickled
        assert pickle.loads(pickled) is getattr(tex, name)
        assert copy.deepcopy(getattr(tex, name)) is getattr(tex, name)

    def test_says_what_it_did_in_a_line(
        self, te: ModuleType, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "transformer_engine_overlay"):
            overlay.enable(strict=True)
            overlay.enable(strict=True)
        (line,) = [record.getMessage() for record in caplog.records]
        for part in (
            "transformer_engine_torch.fused_rope_forward",
            "transformer_engine.pytorch.cpp_extensions.fused_rope_backward",
            "TransformerEngine 2.18.0",
            "unset: automatic",
        ):
            assert part in line

    def test_from_many_threads(self, te: ModuleType) -> None:
        tex = sys.modules["transformer_engine_torch"]
        originals = {name: getattr(tex, name) for name in NAMES}
        wrong: list[BaseException] = []
        stop = threading.Event()

        def toggle() -> None:
            while not stop.is_set():
                overlay.enable(strict=True)
                overlay.disable()

        def call() -> None:
            # Routed or not, each call ends in one of the two ways.
            for _ in range(300):
                try:
                    assert same_bits(te.forward(*thd_arguments()), expected())
                except tex.OriginalCalled:
                    pass
                except BaseException as error:
                    wrong.append(error)

        togglers = [threading.Thread(target=toggle) for _ in range(2)]
        callers = [threading.Thread(target=call) for _ in range(3)]
        for thread in togglers + callers:
            thread.start()
        for thread in callers:
            thread.join()
        stop.set()
        for thread in togglers:
            thread.join()
        assert not wrong
        overlay.disable()
        assert all(getattr(tex, name) is originals[name] for name in NAMES)


class TestPatched:
    def test_restores_on_leaving(self, te: ModuleType) -> None:
        tex = sys.modules["transformer_engine_torch"]
        original = tex.fused_rope_forward
        with overlay.patched() as enabled:
            assert enabled
            assert overlay.status().enabled
        assert tex.fused_rope_forward is original

    def test_restores_after_an_error(self, te: ModuleType) -> None:
        with pytest.raises(KeyError), overlay.patched():
            raise KeyError
        assert not overlay.status().enabled

    def test_leaves_an_enabled_overlay_enabled(self, te: ModuleType) -> None:
        overlay.enable(strict=True)
        with overlay.patched(), overlay.patched():
            pass
        assert overlay.status().enabled

    def test_is_strict_unless_told_otherwise(self, stub: Callable[..., None]) -> None:
        stub(version="2.9.0")
        with pytest.raises(overlay.OverlayError), overlay.patched():
            pass
        with overlay.patched(strict=False) as enabled:
            assert not enabled


class TestForeignPatch:
    def test_beneath_is_refused_and_left_alone(self, te: ModuleType) -> None:
        tex = sys.modules["transformer_engine_torch"]

        def foreign(*args: Any) -> str:
            return "foreign"

        tex.fused_rope_forward = foreign
        with pytest.raises(overlay.OverlayError, match=r"foreign, not TransformerEngine's own"):
            overlay.enable(strict=True)
        assert tex.fused_rope_forward is foreign
        assert "another patch" in overlay.status().problem

    def test_on_top_is_neither_clobbered_nor_lost(
        self, te: ModuleType, caplog: pytest.LogCaptureFixture
    ) -> None:
        tex = sys.modules["transformer_engine_torch"]
        originals = {name: getattr(tex, name) for name in NAMES}
        overlay.enable(strict=True)
        ours = tex.fused_rope_forward
        seen = []

        def foreign(*args: Any) -> Any:
            seen.append(args)
            return ours(*args)

        tex.fused_rope_forward = foreign
        assert overlay.enable(strict=True)
        assert tex.fused_rope_forward is foreign
        assert "on top of the overlay; it was left alone" in caplog.text
        assert "patched by others" in overlay.status().problem
        assert same_bits(te.forward(*thd_arguments()), expected())

        overlay.disable()
        assert tex.fused_rope_forward is foreign
        assert tex.fused_rope_backward is originals["fused_rope_backward"]
        with pytest.raises(tex.OriginalCalled):  # through the foreign function and through ours
            te.forward(*thd_arguments())
        assert len(seen) == 2

        assert overlay.enable(strict=True)
        assert tex.fused_rope_forward is foreign
        assert same_bits(te.forward(*thd_arguments()), expected())
        assert same_bits(te.rope.backward(*thd_arguments()), expected(transpose=True))

        overlay.disable()
        tex.fused_rope_forward = ours  # the foreign patch is taken out
        overlay.disable()
        assert all(getattr(tex, name) is originals[name] for name in NAMES)


class TestStatus:
    def test_without_te_imports_nothing(self, stub: Callable[..., None]) -> None:
        status = overlay.status()
        assert not status.enabled
        assert status.sites == {}
        assert "transformer_engine" not in sys.modules

    def test_lists_sites_and_counts(self, te: ModuleType) -> None:
        overlay.enable(strict=True)
        before = overlay.status()
        te.forward(*thd_arguments())
        after = overlay.status()
        assert after.enabled
        assert set(after.sites.values()) == {"routed"}
        assert len(after.sites) == 4
        assert sum(after.routed.values()) == sum(before.routed.values()) + 1
        assert after.problem == ""

    def test_original_is_the_saved_object(self, te: ModuleType) -> None:
        tex = sys.modules["transformer_engine_torch"]
        forward = tex.fused_rope_forward
        with pytest.raises(overlay.OverlayError, match="enable the overlay first"):
            patching.original("fused_rope_forward")
        overlay.enable(strict=True)
        assert patching.original("fused_rope_forward") is forward
