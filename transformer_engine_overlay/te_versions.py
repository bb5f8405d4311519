# SPDX-License-Identifier: Apache-2.0
"""What is known of TransformerEngine's releases: the one table of versions."""

from __future__ import annotations

import re
from dataclasses import dataclass

Version = tuple[int, int]


@dataclass(frozen=True)
class Release:
    """A span of releases whose fused RoPE is alike.

    Attributes
    ----------
    first, last : tuple of int
        Major and minor of the first and the last release, both included.
    blob : str
        Start of the git blob id of ``transformer_engine/common/fused_rope/fused_rope.cu``, or "".
    launch : str
        How it launches THD.
    supported : bool
        Whether calls of it can be routed.
    """

    first: Version
    last: Version
    blob: str
    launch: str
    supported: bool


RELEASES = (
    # Before 2.3 the functions have other names; before 2.10 backward lacks start_positions.
    Release((2, 0), (2, 9), "", "legacy grid", supported=False),
    # Differs from the next by the copyright year only.
    Release((2, 10), (2, 11), "597a5d3c29", "legacy grid", supported=True),
    Release((2, 12), (2, 18), "27dc11ab43", "legacy grid", supported=True),
    Release((2, 19), (2, 20), "c7b762e973", "legacy or linear grid, by size", supported=True),
)

FIRST_SUPPORTED = min(release.first for release in RELEASES if release.supported)
LAST_LISTED = max(release.last for release in RELEASES)


def parse_version(text: str) -> Version | None:
    """Return major and minor of a version such as ``2.18.0+abc``, or None if it has none."""
    match = re.match(r"\s*v?(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def find_release(version: Version) -> Release | None:
    """Return the table's entry for a version, or None if it is not listed."""
    for release in RELEASES:
        if release.first <= version <= release.last:
            return release
    return None
