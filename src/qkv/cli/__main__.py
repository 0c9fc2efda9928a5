"""`python -m qkv.cli`, the same as `qkv`."""

from __future__ import annotations

import sys

from qkv.cli import main

sys.exit(main())
