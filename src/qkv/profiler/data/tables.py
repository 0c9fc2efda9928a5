"""Tables of one group of a profile: where each head sends its weight, which tokens attract it, and the types of heads.

The types (induction, previous token, sink, local …) are told by scores with fixed thresholds.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xarray as xr

from qkv.profiler.data.variables import BY_HEAD, OF_HEADS, OF_WEIGHTS, custom_variables

if TYPE_CHECKING:
    import pandas as pd


SINK_THRESHOLD = 0.3  # ε of Gu et al. 2025: more than this weight on the first token is a sink
# The target of a head is, in this order: the strongest target if it receives TARGET_SHARE of the weight; the
# neighbourhood if it receives LOCAL_SHARE; the strongest target if it receives FAINT_SHARE; else "spread".
TARGET_SHARE = 0.4
LOCAL_SHARE = 0.5
FAINT_SHARE = 0.25
LIFT = 2.0  # a token is a target only if it receives twice its share of the keys: frequent tokens receive much anyway


def head_table(data: xr.Dataset) -> pd.DataFrame:
    """One row per layer and head; `Profile.heads` documents the columns."""
    names = (*(name for name in OF_HEADS if name in data), "entropy_ratio", "sink_share")
    table = heads_of(data).assign(module=np.repeat(data["module"].values, data.sizes["head"]))
    for name in names:  # one of them is "self"
        table[name] = mean_of_heads(data, name).ravel()
    top = _top_keys(data)
    table["top_key"], table["top_key_token"], table["top_key_share"] = top
    table["target"], table["target_share"] = _targets(data, table)
    table["goes_to"] = [
        f"{target} {100 * share:.0f} %" if target != "spread" else _spread(keys)
        for target, share, keys in zip(table["target"], table["target_share"], table["effective_keys"], strict=True)
    ]
    for name in custom_variables(data):
        table[name] = over_texts(data[name + BY_HEAD].values).ravel()
    return table


def _spread(keys: float) -> str:
    """Where a head without a target sends its weight; one key of each query is not the same key for all."""
    return "1 key a query" if keys < 1.5 else f"spread ({keys:.0f} keys)"


def heads_of(data: xr.Dataset) -> pd.DataFrame:
    """A table with the layer and the number of each head."""
    import pandas as pd

    layers, heads = data["layer"].values, data["head"].values
    return pd.DataFrame({"layer": np.repeat(layers, len(heads)), "head": np.tile(heads, len(layers))})


def even_shares(data: xr.Dataset) -> np.ndarray:
    """The share that a row of even weights gives each key, (text, layer, head, query); 0 without a visible key."""
    visible = data["visible"].values
    return np.divide(1, visible, out=np.zeros(visible.shape), where=visible > 0)


def mean_of_heads(data: xr.Dataset, name: str) -> np.ndarray:
    """One column of `head_table` as (layer, head): the mean over the queries of each text, then over texts."""
    valid, later = valid_queries(data), later_queries(data)
    if name == "entropy_ratio":
        seen = data["visible"].values
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(seen >= 2, data["entropy"].values / np.log(seen), np.nan)
        return by_head(ratio, valid)
    if name == "sink_share":
        sink = data["sink"].values
        caught = np.where(np.isnan(sink), np.nan, sink > SINK_THRESHOLD)
        return by_head(caught, later)
    statistic = OF_WEIGHTS[name]
    chosen = later if statistic.from_second else valid
    return over_texts(statistic.by_head(data[name].values, chosen))


def token_table(data: xr.Dataset) -> pd.DataFrame:
    """One row per distinct key token, the most attended first; `Profile.tokens` documents the columns."""
    import pandas as pd

    share = received_share(data).mean(axis=(1, 2))  # (text, key)
    tokens, valid = data["key_token"].values, valid_keys(data)
    text, position = np.nonzero(valid)
    rows = pd.DataFrame(
        {
            "token": tokens[valid],
            "share": share[valid],
            "keys": 1 / valid.sum(1)[text],
            "text": text,
            "position": position,
        }
    )
    best = rows.sort_values("share", ascending=False).drop_duplicates("token").set_index("token")
    by_token = rows.groupby("token", sort=False)
    table = pd.DataFrame({"share": by_token["share"].sum(), "count": by_token.size(), "keys": by_token["keys"].sum()})
    table["lift"] = table["share"] / table["keys"]
    table["share"] /= data.sizes["text"]
    table[["text", "position"]] = best[["text", "position"]]
    table = table.drop(columns="keys").sort_values("share", ascending=False, kind="stable")
    return table.reset_index()


def destinations(data: xr.Dataset) -> dict[str, np.ndarray]:
    """Where each head's weight goes: disjoint shares that add up to the whole weight, each (text, layer, head).

    A key counts once, under the first name that fits: first (the first token), special (other special
    tokens), self, previous, next, nearby (within the local window), elsewhere. `sink_logit` is the mass of a
    learned sink. The shares follow exactly from the stored statistics with one exception: the weight on a special
    token 2 to `local_window` tokens away cannot be separated from that of its neighbours unless `weights` are kept,
    so for these few queries the weight "nearby" is counted as "elsewhere".
    """
    special = special_keys(data)
    texts = [_text_destinations(data.isel(text=text), special[text]) for text in range(data.sizes["text"])]
    return {name: np.stack([shares[name] for shares in texts]) for name in texts[0]}


def _text_destinations(one: xr.Dataset, special: np.ndarray) -> dict[str, np.ndarray]:
    n_queries, n_keys, window = int(one["n_queries"]), int(one["n_keys"]), int(one.attrs["local_window"])
    special = special[:n_keys] & (np.arange(n_keys) > 0)
    taken = special | (np.arange(n_keys) == 0)
    own = np.arange(n_queries) + (n_keys - n_queries if one.attrs["causal"] else 0)  # each query's own key

    def queries(name: str) -> np.ndarray:
        return np.nan_to_num(one[name].values[..., :n_queries].astype(np.float64))

    received = np.nan_to_num(one["received"].values[..., :n_keys].astype(np.float64))
    sums = {"first": received[..., 0], "special": received[..., special].sum(-1)}
    for name, offset in (("self", 0), ("previous", -1), ("next", 1)):
        key = own + offset
        counts = (key >= 0) & (key < n_keys)
        counts[counts] = ~taken[key[counts]]
        sums[name] = queries(name)[..., counts].sum(-1)

    sums["nearby"] = np.zeros(received.shape[:-1])
    if np.isfinite(one["local"].values).any():  # NaN in cross-attention, where distances are not defined
        nearby = queries("local") - queries("self") - queries("previous") - queries("next")
        nearby -= np.where((own >= 2) & (own <= window), queries("sink"), 0)
        away = np.abs(own[:, None] - np.flatnonzero(special)[None, :])
        close = (away >= 2) & (away <= window)
        weights = one["weights"].values[..., :n_queries, :n_keys][..., special] if "weights" in one else None
        if weights is not None and np.isfinite(weights).all():
            nearby -= (weights * close).sum(-1) / divisors(one)[..., :n_queries]
        else:
            nearby[..., close.any(1)] = 0
        sums["nearby"] = np.maximum(nearby, 0).sum(-1)
    sums["elsewhere"] = received.sum(-1) - sum(sums.values())
    sums["sink_logit"] = queries("sink_mass").sum(-1) if "sink_mass" in one else np.zeros(received.shape[:-1])
    return {name: np.maximum(total, 0) / n_queries for name, total in sums.items()}


def valid_queries(data: xr.Dataset) -> np.ndarray:
    """True at queries that belong to the text, False at padding: (text, query)."""
    return np.arange(data.sizes["query"]) < data["n_queries"].values[:, None]


def later_queries(data: xr.Dataset) -> np.ndarray:
    """True at the queries after the first of a text, which in a causal model attends only to itself: (text, query)."""
    return valid_queries(data) & (np.arange(data.sizes["query"]) >= 1)


def valid_keys(data: xr.Dataset) -> np.ndarray:
    """True at keys that belong to the text, False at padding: (text, key)."""
    return np.arange(data.sizes["key"]) < data["n_keys"].values[:, None]


def special_keys(data: xr.Dataset) -> np.ndarray:
    """True at special tokens such as [SEP]: (text, key)."""
    special = set(data.attrs["special_tokens"])
    tokens = data["key_token"].values
    return np.array([[token in special for token in row] for row in tokens], bool) & valid_keys(data)


def raw_weights(data: xr.Dataset, name: str) -> np.ndarray:
    """A variable that holds shares of the row as the model's own weights, which may add up to more or less than 1.

    NaN in layers whose row sums are unknown.
    """
    return np.where(rows_known(data)[None, :, None, None], data[name].values * divisors(data), np.nan)


def rows_known(data: xr.Dataset) -> np.ndarray:
    """True at layers whose rows are known to be shares: (layer).

    A profile that was built by hand may have no row sums; its variables are the model's own weights, which are shares
    where they are a softmax, which has a log-sum-exp.
    """
    softmax: np.ndarray = np.isfinite(data["lse"].values).any((0, 2, 3))
    return softmax | ("row_sum" in data)


def divisors(data: xr.Dataset) -> np.ndarray:
    """What the model's own weights were divided by to give shares of the row: (text, layer, head, query).

    It is the sum of the row, in which a null key counts; 1 for rows that sum to 0, and for profiles without row sums.
    """
    if "row_sum" not in data:
        return np.ones_like(data["entropy"].values)
    total = data["row_sum"].values.astype(np.float64)
    total = total + (data["sink_mass"].values if "sink_mass" in data else 0)
    return np.where(total > 0, total, 1.0)


def received_share(data: xr.Dataset) -> np.ndarray:
    """Share of a text's attention that each key receives, (text, layer, head, key); 0 beyond the text."""
    received = np.nan_to_num(data["received"].values.astype(np.float64))
    return received / data["n_queries"].values[:, None, None, None]


def by_head(values: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Mean over the queries of each text where `keep` is True and the value finite, then over texts: (layer, head)."""
    return over_texts(_mean(values, np.isfinite(values) & keep[:, None, None, :], axis=-1))


def over_texts(values: np.ndarray) -> np.ndarray:
    """Mean over the texts in which the value is finite: (text, …) -> (…)."""
    return _mean(values, np.isfinite(values), axis=0)


def readable(token: str) -> str:
    """A token for display, without the tokenizer's markers for spaces and newlines."""
    text = plain(token)
    return text.strip() or ("⏎" if "\n" in text else "␣")


def token_names(tokens: Iterable[str]) -> dict[str, str]:
    """A name for each of these tokens: `readable`, with all white space visible where that would be another's name.

    >>> token_names([" the", "the", " of"]) == {" the": "␣the", "the": "the", " of": "of"}
    True
    """
    names = {token: readable(token) for token in tokens}
    count = Counter(names.values())
    return {token: name if count[name] == 1 else plain(token).translate(_VISIBLE) for token, name in names.items()}


_VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "\f": "␌", "\xa0": "⍽"})


def names_of(data: xr.Dataset) -> dict[str, str]:
    """`token_names` of all keys of a group."""
    return token_names(set(data["key_token"].values[valid_keys(data)]))


def plain(token: str) -> str:
    """A token as text: the tokenizer's markers become spaces and newlines."""
    return token.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")


def _mean(values: np.ndarray, keep: np.ndarray, axis: int) -> np.ndarray:
    """Mean of the values where `keep` is True; NaN, without a warning, where `keep` is False throughout."""
    count = keep.sum(axis)
    total = np.where(keep, values, 0).sum(axis, dtype=np.float64)
    return np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0)


def _top_keys(data: xr.Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Position, token and share of the key that each head attends to most, over all texts."""
    share = np.moveaxis(received_share(data), 0, 2)  # (layer, head, text, key)
    share = share.reshape(-1, data.sizes["text"] * data.sizes["key"])
    best = share.argmax(1)
    text, key = np.divmod(best, data.sizes["key"])
    return key, data["key_token"].values[text, key], share[np.arange(len(best)), best]


def _targets(data: xr.Dataset, table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """The target of each head and its share of the weight ("spread" and NaN for a head without a target)."""
    _, labels, shares = _token_shares(data)
    for name in ("self", "previous", "next"):
        labels.append(name)
        shares = np.column_stack([shares, np.nan_to_num(table[name].to_numpy())])
    if "sink_mass" in data:
        labels.append("learned sink")
        taken = by_head(data["sink_mass"].values, valid_queries(data))
        shares = np.column_stack([shares, taken.ravel()])
    best, share = np.array(labels, object)[shares.argmax(1)], shares.max(1)
    # In a short text every key is near, so the neighbourhood must receive clearly more than its uniform share.
    local = np.where(table["local"] >= 1.5 * uniform_local(data), table["local"], 0)
    kinds = [(share < TARGET_SHARE) & (local >= LOCAL_SHARE), share >= FAINT_SHARE]
    targets = np.select(kinds, [f"local ±{data.attrs['local_window']}", best], "spread")
    return targets, np.select(kinds, [local, share], np.nan)


def _token_shares(data: xr.Dataset) -> tuple[list[str | None], list[str], np.ndarray]:
    """Share of each head's weight on the first token and on each distinct token: tokens, labels, (layer·head, label).

    A first token that is special is not listed as "first token" but under its own name, such as [CLS].
    """
    share, valid, special = received_share(data), valid_keys(data), special_keys(data)
    texts, heads = data.sizes["text"], share.shape[1] * share.shape[2]
    plain_first = ~special[:, 0]
    distinct = sorted(set(data["key_token"].values[valid]))  # not np.unique: NumPy's strings drop trailing NULs
    number = {token: index for index, token in enumerate(distinct)}
    total, share_of_keys = np.zeros((heads, len(distinct))), np.zeros(len(distinct))
    for text in range(texts):
        positions = np.flatnonzero(valid[text])[int(plain_first[text]) :]
        index = np.array([number[token] for token in data["key_token"].values[text, positions]], int)
        for head, row in enumerate(share[text].reshape(heads, -1)):
            total[head] += np.bincount(index, row[positions], len(distinct)) / texts
        share_of_keys += np.bincount(index, minlength=len(distinct)) / valid[text].sum() / texts
    is_special = np.isin(distinct, data.attrs["special_tokens"])
    total[:, ~is_special] *= total[:, ~is_special] >= LIFT * share_of_keys[~is_special]
    first = (share[..., 0] * plain_first[:, None, None]).mean(0).reshape(-1, 1)
    names = names_of(data)
    labels = [token if known else f"“{names[token]}”" for token, known in zip(distinct, is_special, strict=True)]
    return [None, *distinct], ["first token", *labels], np.hstack([first, total])


def repeated_shares(data: xr.Dataset) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Tokens that occur more than once after the first: names, the share of each head on them, and their number.

    A share counts if it is at least `LIFT` times the token's share of the keys: (layer·head, token). Special tokens
    are left out.
    """
    tokens, labels, shares = _token_shares(data)
    valid = valid_keys(data)
    valid[:, 0] = False
    special, count = set(data.attrs["special_tokens"]), Counter(data["key_token"].values[valid])
    chosen = [at for at, token in enumerate(tokens) if token not in special and count[token] > 1]
    counts = np.array([count[tokens[at]] for at in chosen], int)
    return [labels[at][1:-1] for at in chosen], shares[:, chosen], counts


def is_short(data: xr.Dataset) -> bool:
    """True if rows of even weights alone would make the first token a sink in the longest text: below 10 tokens.

    Between two texts and where queries see later tokens, below 4. Nothing can be said then about where a head attends.
    """
    n_queries, n_keys = int(data["n_queries"].max()), int(data["n_keys"].max())
    causal = data.attrs["causal"] and n_queries == n_keys
    even = 1 / np.arange(1, min(n_queries, 64) + 1) if causal else np.array([1 / n_keys])
    return bool(even.mean() > SINK_THRESHOLD)


def uniform_local(data: xr.Dataset) -> float:
    """The mass inside the local window under uniform attention."""
    window, shares = min(int(data.attrs["local_window"]), int(data["n_keys"].max())), []
    for n_queries, n_keys in zip(data["n_queries"].values, data["n_keys"].values, strict=True):
        query = np.arange(n_queries)
        if data.attrs["causal"]:
            visible = query + 1 + n_keys - n_queries
            shares.append((np.minimum(visible, window + 1) / np.maximum(visible, 1)).mean())
        else:
            low, high = np.maximum(query - window, 0), np.minimum(query + window, n_keys - 1)
            shares.append((np.maximum(high - low + 1, 0) / n_keys).mean())
    return float(np.mean(shares))


UNIFORM = 0.9  # a head is uniform if its entropy reaches this share of that of uniform attention


class Kind(NamedTuple):
    """A head type: `score` gives an array (layer, head), and a head has the type if its score reaches `threshold`."""

    definition: str
    threshold: float
    score: Callable[[xr.Dataset], np.ndarray | None]
    below: bool = False  # the head has the type if its score is at most the threshold


def _variable(name: str) -> Callable[[xr.Dataset], np.ndarray | None]:
    return lambda data: data[name].values if name in data else None


def _column(name: str) -> Callable[[xr.Dataset], np.ndarray | None]:
    return lambda data: np.asarray(mean_of_heads(data, name), np.float64)


def prefix_sink_scores(data: xr.Dataset) -> np.ndarray | None:
    """Sink scores of the first 64 tokens, averaged over texts: (layer, head, key)."""
    return over_texts(data["prefix_sink_scores"].values) if "prefix_sink_scores" in data else None


def _first(data: xr.Dataset) -> np.ndarray | None:
    score = prefix_sink_scores(data)
    return None if score is None else score[..., 0]


def sink_scores(data: xr.Dataset) -> np.ndarray | None:
    """Share of the row on each key, averaged over the queries that may attend to it: (text, layer, head, key).

    NaN at keys that are visible to fewer than eight queries or to less than an eighth of them, such as the last tokens
    of a causal text. If a short window leaves every key with fewer, the keys visible to the most queries count.
    """
    if "visible_queries" not in data:
        return None
    visible_queries = data["visible_queries"].values
    most = np.nanmax(visible_queries, -1, keepdims=True, initial=0)
    least = np.minimum(np.maximum(8, data["n_queries"].values / 8)[:, None, None, None], most)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(
            (visible_queries >= least) & (visible_queries > 0), data["received"].values / visible_queries, np.nan
        )


def _first_of_whole(data: xr.Dataset) -> np.ndarray | None:
    score = sink_scores(data)
    return None if score is None else over_texts(score[..., 0])


def _other_sink(data: xr.Dataset) -> np.ndarray | None:
    score = sink_scores(data)
    if score is None:
        return None
    others = score[..., 1:]
    best = np.where(np.isnan(others).all(-1), np.nan, np.nan_to_num(others).max(-1, initial=0))
    return over_texts(best)


def _delimiters(data: xr.Dataset) -> np.ndarray | None:
    """Share of the weight on delimiters, or 0 if it is less than twice their share of the keys."""
    chosen = delimiter_keys(data)
    chosen[:, 0] = False
    share = received_share(data)
    taken = (np.nan_to_num(share) * chosen[:, None, None]).sum(-1)
    expected = (chosen.sum(-1) / np.maximum(valid_keys(data).sum(-1), 1))[:, None, None]
    return over_texts(np.where(taken >= 2 * expected, taken, 0))


def delimiter_keys(data: xr.Dataset) -> np.ndarray:
    """True at special tokens, punctuation and white space: (text, key)."""
    special = set(data.attrs["special_tokens"])
    tokens = data["key_token"].values
    known = {token: token in special or is_delimiter(str(token)) for token in set(tokens.ravel())}
    chosen = np.array([[known[str(token)] for token in row] for row in tokens], bool)
    return chosen & valid_keys(data)


def _local(data: xr.Dataset) -> np.ndarray:
    near = mean_of_heads(data, "local")
    return np.where(near >= 1.5 * uniform_local(data), near, 0)


def _streaming(data: xr.Dataset) -> np.ndarray | None:
    """Mass on the keys that a streaming cache keeps, for queries with at least four times as many visible keys."""
    if "streaming_mass" not in data or "streaming_first" not in data.attrs:
        return None
    kept = data.attrs["streaming_first"] + data.attrs["streaming_last"]
    long = data["visible"].values >= 4 * kept
    if not long.any():
        return None
    values = np.where(long, data["streaming_mass"].values, np.nan)
    return by_head(values, valid_queries(data))


def _retrieval(data: xr.Dataset) -> np.ndarray | None:
    """Share of the row on keys that a streaming cache evicts, a learned sink excluded; NaN if rows are not shares.

    0 for a uniform head, which retrieves no key in particular.
    """
    kept = _streaming(data)
    if kept is None:
        return None
    if "sink_mass" in data:
        kept = kept + by_head(data["sink_mass"].values, valid_queries(data))
    whole = 1.0 if "row_sum" not in data else by_head(data["row_sum"].values > 0, valid_queries(data))
    with np.errstate(invalid="ignore"):
        uniform = mean_of_heads(data, "entropy_ratio") >= UNIFORM
    evicted = np.where(uniform, 0, np.clip(whole - kept, 0, 1))
    return np.where(rows_known(data)[:, None], evicted, np.nan)


ROLES = {  # the type of a head is the first role whose score reaches its threshold
    "induction": Kind(
        "on random tokens that come twice, share of the row on the token after the first occurrence "
        "(Olsson et al. 2022)",
        0.3, _variable("probe_induction"),
    ),
    "duplicate token": Kind(
        "on random tokens that come twice, share of the row on the first occurrence (Wang et al. 2023)",
        0.3, _variable("probe_duplicate"),
    ),
    "previous token": Kind("share of the row on the token before", 0.4, _column("previous")),
    "self": Kind("share of the row on the query's own token", 0.4, _column("self")),
    "first token": Kind("sink score of the first token over the first 64 queries (Gu et al. 2025)", 0.3, _first),
    "other sink": Kind("the largest sink score of any other token", 0.3, _other_sink),
    "delimiter": Kind(
        "share of the row on punctuation, white space and special tokens except the first token, if at least twice "
        "their share of the keys",
        0.4, _delimiters,
    ),
    "local": Kind(
        "share of the row on the nearest tokens, if at least 1.5 times that of uniform attention", 0.5, _local
    ),
    "uniform": Kind("entropy divided by that of uniform attention", UNIFORM, _column("entropy_ratio")),
}  # fmt: skip
TRAITS = {  # a head can have several traits
    "sparse": Kind("effective number of keys: 1 / the sum of squared weights",
                   3.0, _column("effective_keys"), below=True),
    "streaming": Kind("share of the row on the first and last keys, which a streaming cache keeps", 0.95, _streaming),
    "retrieval": Kind(
        "share of the row on the keys that a streaming cache evicts, 0 for uniform heads (after Xiao et al. 2024, "
        "DuoAttention)",
        0.3, _retrieval,
    ),
    "positional": Kind("1 − total variation between the rows on random tokens and on the same shuffled", 0.8,
                       _variable("probe_positional")),
    "content": Kind(
        "1 − total variation between the rows on random tokens and on the same shuffled; low if they follow tokens",
        0.4, _variable("probe_positional"), below=True,
    ),
}  # fmt: skip
MIXED = "mixed"
PROBED = ("induction", "duplicate token", "positional", "content")  # told by synthetic texts, not by the text itself


def type_table(data: xr.Dataset, *, whole: bool = False) -> pd.DataFrame:
    """One row per layer and head; `Profile.types` documents the columns.

    With `whole`, the score of the first token is its sink score over the whole text. A text that `is_short` tells no
    types: only those of the synthetic texts are given.
    """
    import pandas as pd

    table, holds, short = heads_of(data), {}, is_short(data)
    for name, kind in (ROLES | TRAITS).items():
        score = _first_of_whole(data) if whole and name == "first token" else kind.score(data)
        table[name] = np.nan if score is None else np.asarray(score, np.float64).ravel()
        with np.errstate(invalid="ignore"):
            holds[name] = (table[name] <= kind.threshold) if kind.below else (table[name] >= kind.threshold)
        holds[name] &= not short or name in PROBED
    found = pd.DataFrame(holds)
    roles = found[list(ROLES)].to_numpy()
    first = np.where(roles.any(1), roles.argmax(1), len(ROLES))
    table.insert(2, "type", np.array([*ROLES, MIXED], object)[first])
    traits = [", ".join(name for name in TRAITS if row[name]) for row in found.to_dict("records")]
    table.insert(3, "traits", traits)
    return table


def telling_heads(data: xr.Dataset) -> list[tuple[int, int]]:
    """The most telling head of each type, as indices of layer and head: the first one is shown first everywhere.

    Heads that follow content go first: induction, then duplicate token, then those with the trait content; only if no
    key receives more than half of their weight on these texts. Among them, and among all others, which come later, the
    product of two numbers decides: the nats by which a query decides about its key (the entropy of what the keys
    receive minus the mean entropy of the rows), and the share of the weight on keys that are neither the first token,
    another special token, the query's own, the previous nor the next one.

    >>> import qkv
    >>> profile = qkv.profile("qkv-mini", progress=False)
    >>> layer, head = telling_heads(profile.data)[0]
    >>> profile.types().query(f"layer == {layer} and head == {head}")["type"].item()
    'induction'
    """
    types, share, goes = type_table(data), received_share(data), destinations(data)
    entropy = -(share * np.log(np.maximum(share, 1e-12))).sum(-1).mean(0)
    decided = np.nan_to_num(entropy - mean_of_heads(data, "entropy"))
    score = (decided * (goes["nearby"] + goes["elsewhere"]).mean(0)).ravel()
    content = types["traits"].str.split(", ").map(lambda traits: "content" in traits)
    kinds = [types["type"] == "induction", types["type"] == "duplicate token", content]
    tier = np.where((share.max(-1).mean(0) <= 0.5).ravel(), np.select(kinds, range(3), 3), 3)
    order = np.lexsort((-score, tier))
    _, best = np.unique(types["type"].to_numpy(str)[order], return_index=True)
    return [divmod(at, data.sizes["head"]) for at in order[np.sort(best)].tolist()]


def is_delimiter(piece: str) -> bool:
    """True if a token, as text or in its tokenizer's spelling, is only punctuation or white space.

    >>> [is_delimiter(piece) for piece in (".", "Ġ(", "##!", "Ċ", "▁a", "")]
    [True, True, True, True, False, False]
    """
    text = plain(piece).replace("<0x0A>", "\n")
    return text != "" and all(unicodedata.category(c).startswith("P") for c in text.strip().removeprefix("##"))
