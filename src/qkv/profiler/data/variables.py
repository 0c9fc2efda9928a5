"""Every quantity a profile may hold: over what it is, in which unit, and what it says."""

from __future__ import annotations

from typing import NamedTuple

QUERY, KEY = ("text", "layer", "head", "query"), ("text", "layer", "head", "key")
TEXT, HEAD = ("text", "layer", "head"), ("layer", "head")
BIN = ("text", "layer", "head", "query_bin", "key_bin")


class Variable(NamedTuple):
    """Dimensions, unit ("1" is a plain number) and definition; whether every profile has it."""

    dims: tuple[str, ...]
    units: str
    definition: str
    always: bool = False


VARIABLES = {
    "entropy": Variable(QUERY, "nats", "−Σ a ln a of the query's weights a, which add up to 1 over the keys", True),
    "lse": Variable(QUERY, "nats", "log-sum-exp of the query's scores, a learned sink included", True),
    "sink": Variable(QUERY, "1", "weight on the first token of the text", True),
    "self": Variable(QUERY, "1", "weight on the query's own token", True),
    "previous": Variable(QUERY, "1", "weight on the token one before", True),
    "next": Variable(QUERY, "1", "weight on the token one after", True),
    "local": Variable(QUERY, "1", "weight on tokens at most `local_window` away", True),
    "distance": Variable(QUERY, "tokens", "mean distance to the keys, by weight", True),
    "spread": Variable(QUERY, "tokens", "standard deviation of the keys' positions, by weight", True),
    "participation": Variable(QUERY, "keys", "1 / Σ a²: how many keys share the weight", True),
    "visible": Variable(QUERY, "keys", "how many keys the query may attend to", True),
    "streaming": Variable(
        QUERY, "1", "weight on what a streaming cache keeps: the first `streaming_first` and last `streaming_last` keys"
    ),
    "sink_mass": Variable(QUERY, "1", "weight on the learned sink logit"),
    "received": Variable(KEY, "queries", "sum of the weights that all queries put on the key", True),
    "audience": Variable(KEY, "queries", "how many queries may attend to the key"),
    "early": Variable(
        ("text", "layer", "head", "early_key"), "1",
        "sink score α_k: weight on the k-th token, averaged over those of the first 64 queries that may see it",
    ),
    "map_max": Variable(BIN, "1", "the largest weight of a bin of `bin_queries` queries × `bin_keys` keys"),
    "map_mean": Variable(BIN, "1", "the average weight of such a bin, pairs the mask hides counting as 0"),
    "weights": Variable((*QUERY, "key"), "1", "all weights, of short texts"),
    "query_norm": Variable(QUERY, "1", "length of the query vector"),
    "key_norm": Variable(KEY, "1", "length of the key vector, as it is compared"),
    "value_norm": Variable(KEY, "1", "length of the value vector"),
    "cosine_first": Variable(TEXT, "1", "mean cosine of the queries to the first token's key"),
    "cosine_others": Variable(TEXT, "1", "mean cosine of the queries to all other keys"),
    "first_key_angle": Variable(TEXT, "degrees", "between the first token's key and the mean of the others"),
    "key_bias_cosine": Variable(TEXT, "1", "mean cosine of the queries to the learned key"),
    "key_directions": Variable((*TEXT, "direction"), "1", "share of the keys' variance in a principal direction"),
    "probe_sink_random": Variable(HEAD, "1", "sink score α of the first token on random tokens"),
    "probe_sink_repeated": Variable(HEAD, "1", "sink score α of the first token on one token repeated"),
    "probe_previous": Variable(HEAD, "1", "weight on the token before, in a repeated random sequence"),
    "probe_duplicate": Variable(HEAD, "1", "weight on the same token's earlier occurrence, there"),
    "probe_induction": Variable(HEAD, "1", "weight on the token after that occurrence, there"),
    "probe_positional": Variable(
        HEAD, "1", "1 − total variation distance between the weights on the text and on its tokens shuffled"
    ),
}  # fmt: skip
PER_QUERY = tuple(name for name, v in VARIABLES.items() if v.dims == QUERY and v.always)

COORDINATES = {
    "layer": ("layer",),
    "head": ("head",),
    "module": ("layer",),
    "query_token": ("text", "query"),
    "key_token": ("text", "key"),
    "n_queries": ("text",),
    "n_keys": ("text",),
}
ATTRIBUTES = ("causal", "local_window", "special_tokens")
