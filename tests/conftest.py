"""One thread: results are the same on every machine, and busy ones do not spin."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
