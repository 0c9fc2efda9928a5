"""The Hugging Face hub: whether it can be reached, so that a name that cannot be loaded is an error within seconds."""

from __future__ import annotations

import functools
import re
import socket
import threading
import urllib.request
from urllib.parse import urlsplit

from qkv.errors import InputError, nearest

PATIENCE = 3.0  # seconds to wait for a connection
NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def only_cached(name: str, known: tuple[str, ...]) -> bool:
    """True if a model of the hub has to come from the local cache, because the hub cannot be reached.

    Args:
        name: of a model on the hub, such as "gpt2" or "meta-llama/Llama-3.2-1B".
        known: names of models that need no hub, for the hint of an error.

    Raises:
        InputError: if the name is not that of a model on the hub, or if it is not cached and the hub cannot be reached.
    """
    expected = f"expected {', '.join(map(repr, known))}, a folder with a model, or a name on the Hugging Face hub"
    if not NAME.fullmatch(name):
        raise InputError(f"model is {name!r}, {expected}{nearest(name, known)}")
    from huggingface_hub import constants, try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    if constants.HF_HUB_OFFLINE or not reachable(constants.ENDPOINT):
        if not cached:
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
            raise InputError(
                f"model is {name!r}, which is not in the cache of the Hugging Face hub, and {why}; "
                f"{expected}{nearest(name, known)}"
            )
        return True
    return False


@functools.cache
def reachable(address: str) -> bool:
    """True if a connection to the host of a web address, or to the proxy for it, succeeds within seconds."""
    parts = urlsplit(address)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"//{proxy}")
    port = parts.port or (80 if parts.scheme == "http" else 443)
    found = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname or "", port), PATIENCE).close()
        except OSError:
            return
        found.set()

    # In a thread, because the look-up of a name has no timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found.is_set()
