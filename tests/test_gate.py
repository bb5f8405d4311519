# SPDX-License-Identifier: Apache-2.0
"""What must hold before TransformerEngine is touched, against a stub."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from stub_fixtures import NAMES, thd_arguments
from te_stub import BACKWARD_OLD, FORWARD, FORWARD_NEW

import transformer_engine_overlay as overlay
from transformer_engine_overlay import _native, gate


class TestGate:
    @pytest.mark.parametrize("version", ["2.10.0", "2.12.1", "2.18.0+cu13.abc", "2.20.2"])
    @pytest.mark.parametrize("signature", [FORWARD, FORWARD_NEW])
    def test_listed_versions_are_enabled_without_a_word(
        self,
        stub: Callable[..., None],
        version: str,
        signature: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        stub(version=version, forward=signature, backward=signature)
        assert overlay.enable(strict=True)
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert overlay.status().te_version == version

    @pytest.mark.parametrize("version", ["2.21.0", "3.0.0.dev1"])
    def test_newer_versions_are_enabled_with_one_warning(
        self, stub: Callable[..., None], version: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        stub(version=version)
        assert overlay.enable(strict=True)
        (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert f"TransformerEngine {version} is not among the listed releases" in warning

    @pytest.mark.parametrize("version", ["1.13.0", "2.0.0", "2.2.0", "2.9.1"])
    def test_p10_older_versions_are_refused(
        self, stub: Callable[..., None], version: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        stub(version=version)
        assert not overlay.enable()
        assert f"TransformerEngine {version} is older than 2.10" in caplog.text
        assert not overlay.status().enabled
        te = sys.modules["transformer_engine.pytorch"]
        with pytest.raises(sys.modules["transformer_engine_torch"].OriginalCalled):
            te.forward(*thd_arguments())
        with pytest.raises(overlay.OverlayError, match="is older than"):
            overlay.enable(strict=True)

    def test_p13_unknown_signature_is_refused(self, stub: Callable[..., None]) -> None:
        stub(version="2.18.0", backward=BACKWARD_OLD)
        message = r"fused_rope_backward of TransformerEngine 2.18.0 takes \(tensor, tensor, format"
        with pytest.raises(overlay.OverlayError, match=message):
            overlay.enable(strict=True)
        tex = sys.modules["transformer_engine_torch"]
        with pytest.raises(tex.OriginalCalled):  # forward fits, and was not rebound all the same
            tex.fused_rope_forward(*thd_arguments())

    @pytest.mark.parametrize("name", NAMES)
    def test_p10_missing_function_is_refused(self, te: ModuleType, name: str) -> None:
        delattr(sys.modules["transformer_engine_torch"], name)
        with pytest.raises(
            overlay.OverlayError, match=f"there is no transformer_engine_torch.{name}"
        ):
            overlay.enable(strict=True)

    def test_missing_format_is_refused(self, te: ModuleType) -> None:
        del sys.modules["transformer_engine_torch"].NVTE_QKV_Format
        with pytest.raises(overlay.OverlayError, match="NVTE_QKV_Format"):
            overlay.enable(strict=True)

    def test_without_te(self, stub: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
        assert not overlay.enable()
        assert "cannot be imported" in caplog.text
        with pytest.raises(
            overlay.OverlayError, match=r"pip install .*transformer-engine\[pytorch\]"
        ):
            overlay.enable(strict=True)
        del sys.modules["transformer_engine"]

    def test_broken_te_is_named(self, stub: Callable[..., None], tmp_path: Path) -> None:
        stub()
        file = tmp_path / "transformer_engine" / "pytorch" / "__init__.py"
        file.write_text("raise OSError('undefined symbol: nvte_something')\n")
        with pytest.raises(overlay.OverlayError, match="OSError: undefined symbol: nvte_something"):
            overlay.enable(strict=True)

    def test_build_without_cuda_is_refused(
        self, te: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_native, "WITH_CUDA", False)
        with pytest.raises(overlay.OverlayError, match="built without CUDA"):
            overlay.enable(strict=True)

    def test_old_driver_is_refused(self, te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_native, "cuda_versions", lambda: (12080, 13000))
        with pytest.raises(overlay.OverlayError, match=r"driver supports CUDA up to 12.8"):
            overlay.enable(strict=True)

    @pytest.mark.parametrize(
        ("doc", "kinds"),
        [
            ("f" + FORWARD, gate.SIGNATURE),
            ("f" + FORWARD_NEW, gate.SIGNATURE),
            ("f" + BACKWARD_OLD, gate.SIGNATURE[:2] + gate.SIGNATURE[3:]),
            ("f(x: list[int], y: dict[str, int]) -> None", ("list[int]", "int")),
            ("f() -> None", ()),
            ("Just words.", None),
            ("", None),
            (None, None),
        ],
    )
    def test_signature_kinds(self, doc: str | None, kinds: tuple[str, ...] | None) -> None:
        def function() -> None: ...

        function.__doc__ = doc
        assert gate.signature_kinds(function) == kinds
