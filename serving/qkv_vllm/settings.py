"""What a server allows, and what a request asks for.

A server turns statistics on by ``additional_config={"qkv": {…}}``, vLLM's own way to configure plugins; a request asks
by ``SamplingParams(extra_args={"qkv": "profile"})``, over HTTP ``"vllm_xargs": {"qkv": "profile"}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from qkv.errors import InputError

ASK, PASSAGES = "qkv", "qkv_passages"
"""The names of a request's arguments."""


@dataclass(frozen=True)
class Settings:
    """The limits of a server.

    >>> Settings.of({"tokens": 512}).tokens
    512
    """

    tokens: int = 8192
    """The longest text, prompt and answer together, whose statistics may be asked for."""
    weights: int = 0
    """All weights are returned of texts up to this long; by default none."""
    passages: int = 32
    """The largest number of passages whose share of each row may be asked for."""
    bytes: int = 2**26
    """The largest answer; a request whose statistics may exceed it is refused."""

    @classmethod
    def of(cls, given: object) -> Settings:
        """Read the value of ``"qkv"`` in vLLM's `additional_config`.

        Raises:
            InputError: for names that are not settings, and values that are not whole numbers.
        """
        if not isinstance(given, Mapping):
            raise InputError(f"additional_config has {given!r} for qkv, expected a mapping, such as {{'tokens': 8192}}")
        known = {f.name for f in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise InputError(
                    f"additional_config has the setting {name!r} for qkv, expected {', '.join(sorted(known))}"
                )
            if type(value) is not int or value < 0:
                raise InputError(f"additional_config has {name} = {value!r} for qkv, expected a whole number")
        return cls(**given)


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    passages: tuple[tuple[int, int], ...] = ()
    """First token and end of each passage of the prompt."""

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> Asked | None:
        """Read the `extra_args` of a request; None if it does not ask.

        Raises:
            InputError: for values of a wrong form.

        >>> Asked.of({"qkv": "profile", "qkv_passages": [0, 4, 4, 9]}).passages
        ((0, 4), (4, 9))
        """
        if extra is None or not {ASK, PASSAGES} & extra.keys():
            return None
        if extra.get(ASK) != "profile":
            raise InputError(f"{ASK} is {extra.get(ASK)!r}, expected 'profile'")
        bounds = extra.get(PASSAGES, [])
        if not isinstance(bounds, list) or len(bounds) % 2 or any(type(x) is not int for x in bounds):
            raise InputError(f"{PASSAGES} is {bounds!r}, expected the first token and the end of each: [0, 40, 40, 95]")
        pairs = tuple(zip(bounds[::2], bounds[1::2], strict=True))
        for start, stop in pairs:
            if not 0 <= start < stop:
                raise InputError(f"{PASSAGES} has the tokens {start} to {stop}, expected a start before the end")
        return cls(pairs)


def check_request(asked: Asked, settings: Settings | None, *, prompt: int, most: int, heads: int, params: Any) -> None:
    """Refuse a request that the server does not allow, or that cannot be measured.

    Args:
        asked: what it asks for.
        settings: those of the server; None if it has not turned statistics on.
        prompt: the number of tokens of its prompt; 0 if it has none, but embeddings.
        most: the largest number of tokens that it may generate.
        heads: the number of heads in all layers.
        params: its `SamplingParams`.

    Raises:
        InputError: in one sentence.
    """
    if settings is None:
        raise InputError(
            f"{ASK}: this server does not measure attention; start it with --additional-config '{{\"qkv\": {{}}}}'"
        )
    if not prompt:
        raise InputError(f"{ASK}: the prompt is given as embeddings, expected text or token ids")
    if params.n != 1:
        raise InputError(f"n is {params.n} with {ASK}, expected 1: each request has one profile")
    if params.stop:
        raise InputError(
            f"stop is {params.stop!r} with {ASK}, expected stop_token_ids: the engine does not see strings"
        )
    if (tokens := prompt + most) > settings.tokens:
        raise InputError(
            f"{ASK}: {prompt} tokens of the prompt and max_tokens {most} are {tokens}, expected at most "
            f"{settings.tokens}, the limit of this server"
        )
    if len(asked.passages) > settings.passages:
        raise InputError(f"{PASSAGES} has {len(asked.passages)} passages, expected at most {settings.passages}")
    if asked.passages and (end := max(stop for _, stop in asked.passages)) > prompt:
        raise InputError(f"{PASSAGES} has a passage that ends at {end}, expected at most {prompt}, the prompt's length")
    numbers = 20 + len(asked.passages) + (tokens if tokens <= settings.weights else 0)
    if (size := 4 * heads * tokens * numbers) > settings.bytes:
        raise InputError(
            f"{ASK}: the statistics of {tokens} tokens and {heads} heads may take {size:,} bytes, expected at most "
            f"{settings.bytes:,}, the limit of this server; ask for fewer max_tokens"
        )
