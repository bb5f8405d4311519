# SPDX-License-Identifier: Apache-2.0
"""Started with Python when ``TE_OVERLAY_ENABLE`` is set: enables the overlay once TE is imported.

A ``.pth`` file beside this one imports it. It imports neither torch nor TransformerEngine, but
waits for ``transformer_engine.pytorch``. TransformerEngine loads its extension by file location, so
no hook could wait for that.
"""

import os
import sys

WAITED_FOR = "transformer_engine.pytorch"


class _EnablingLoader:
    """Stands in for a module's loader until the module is executed, then enables the overlay."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _stop_waiting()
        _enable()


class _Waiter:
    """A finder that knows one module, and finds it as the other finders do."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != WAITED_FOR:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _EnablingLoader(spec.loader)
                return spec
        return None


_waiter = _Waiter()


def _stop_waiting():
    if _waiter in sys.meta_path:
        sys.meta_path.remove(_waiter)


def _enable():
    """Enable the overlay; whatever goes wrong must not break the import of TransformerEngine."""
    try:
        from transformer_engine_overlay import patching

        patching.enable()
    except Exception as error:
        _complain(f"the overlay could not be enabled: {type(error).__name__}: {error}")


def _complain(text):
    # Not through logging or warnings: at start-up nobody has set them up, and this must be seen.
    print(f"te_overlay_activate: {text}", file=sys.stderr)


def _start():
    value = os.environ.get("TE_OVERLAY_ENABLE", "0")
    if value == "1":
        sys.meta_path.insert(0, _waiter)
    elif value not in ("", "0"):
        _complain(f"TE_OVERLAY_ENABLE is '{value}'; it must be 1 (enable), 0 or unset")


_start()
