"""Whatever proposes. One module per method, all behind `Drafter` (see `base.py`)."""
