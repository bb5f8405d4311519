# SPDX-License-Identifier: Apache-2.0
"""``python -m transformer_engine_overlay`` is ``te-overlay``."""

from transformer_engine_overlay.cli import main

if __name__ == "__main__":
    main()
