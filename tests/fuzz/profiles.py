# SPDX-License-Identifier: Apache-2.0
"""How many calls are drawn: ``TE_OVERLAY_FUZZ`` is ``ci`` (or unset), ``long`` or a number.

``ci`` draws the same calls each time; the others draw new ones, and keep what fails in hypothesis's
own folder, to be run first the next time.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

NUM_EXAMPLES = {"ci": 60, "long": 20_000}


def profile() -> settings:
    """Return the settings for each property."""
    value = os.environ.get("TE_OVERLAY_FUZZ", "ci")
    if value not in NUM_EXAMPLES and not (value.isdigit() and int(value) > 0):
        raise ValueError(f"TE_OVERLAY_FUZZ is {value!r}; it must be ci, long or a number of calls")
    return settings(
        max_examples=NUM_EXAMPLES.get(value) or int(value),
        derandomize=value == "ci",
        deadline=None,
        print_blob=True,
        # The fixtures of a property are the same for all of its calls, and keep nothing of them.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        **({"database": None} if value == "ci" else {}),
    )
