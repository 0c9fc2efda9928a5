"""The web server behind `qkv view`. It serves profiles and models as pages, numbers and map tiles. No other package of
qkv imports it, so FastAPI is only needed for `qkv view`.

It imports runs and reports. Read `run.py`, then `routes.py`.
"""

from __future__ import annotations
