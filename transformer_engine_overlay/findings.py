# SPDX-License-Identifier: Apache-2.0
"""What `te-overlay doctor` has to say about something, and what would help."""

from __future__ import annotations

from dataclasses import dataclass

PROBLEM = "problem"
NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """Something worth saying.

    Attributes
    ----------
    level : str
        "problem": it keeps the overlay or TransformerEngine from working here. "note": it does not.
    what : str
        What was found.
    remedy : str
        What would help.
    """

    level: str
    what: str
    remedy: str
