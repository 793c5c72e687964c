"""Write the tables of architectures.md and models.md: `python tests/docs/record_models.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs.model_table import record_page
from docs.models_page import record_section

if __name__ == "__main__":
    record_page()
    record_section()
