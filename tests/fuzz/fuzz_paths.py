"""Puts the folder of the test tools on the path, for ``python tests/fuzz/fuzz.py``."""

import sys
from pathlib import Path

_TOOLS = str(Path(__file__).parents[1])
if _TOOLS not in sys.path:
    sys.path.insert(1, _TOOLS)
