"""The sentences about a profile: its headline, its findings and the next steps.

All of them judge heads by one taxonomy (`Profile.types`), and sinks by one score: the mean share of the row on
the first token (Gu et al. 2025), over the first 64 queries and over the whole text.
"""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qkv.profiler.data import images, sinks, tables
from qkv.profiler.data.frames import counted, percent, written
from qkv.profiler.data.tables import MIXED, sink_scores, type_table

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


SHARED = ("chat", "tokens", "beyond", "device", "dtype")  # options that all commands take, with the same meaning
OWN_TEXT = ("ablate", "evict")  # without a text, these commands take one of their own


class Step(NamedTuple):
    """What to do next: its purpose, the command to copy, and the head that it is about."""

    purpose: str
    command: str
    layer: int | None = None
    head: int | None = None


def _command(given: Mapping[str, Any], name: str, options: Iterable[str]) -> str:
    """A command on the model and text of an earlier command, whose arguments are `given`."""
    words = ["qkv", name]
    if given["model"] != "qkv-mini" or {"text", "file", "chat"} & given.keys():
        words.append(given["model"])
    if "text" in given:
        words.append(given["text"])
    if "file" in given:
        words += ["--file", given["file"]]
    if "image" in given:  # only maps are drawn of models that read images
        words += ["--image", given["image"]]
    if "target" in given and name not in OWN_TEXT:
        words += ["--target", given["target"]]
    for option in SHARED:
        if option in given:
            words += [f"--{option}"] if given[option] is True else [f"--{option}", str(given[option])]
    return shlex.join([*words, *options])


_DOES = {  # predicates of "one head …" and of "many heads …"
    "induction": ("is an induction head", "are induction heads"),
    "duplicate token": ("attends to an earlier copy of the token", "attend to an earlier copy of the token"),
    "previous token": ("attends to the previous token", "attend to the previous token"),
    "self": ("attends to the token itself", "attend to the token itself"),
    "first token": ("has its sink at the first token", "have their sink at the first token"),
    "other sink": ("has its main sink at another token", "have their main sink at another token"),
    "delimiter": ("attends to delimiters", "attend to delimiters"),
    "local": ("attends to the nearest tokens", "attend to the nearest tokens"),
    "uniform": ("spreads its weight evenly", "spread their weight evenly"),
    MIXED: ("has no single type", "have no single type"),
}
SMALLEST_CACHE = 32  # keys of the smallest cache that `qkv evict` compares unless other budgets are given
ADDS_LITTLE = 0.1  # a sink whose value gives at most this share of what the values add is said to add little
SHORT = 0.7  # a value is called short if its norm is below this part of the mean of the others
FADES = 0.9  # a trend is said to fall or rise if its last value differs from the first by more than this factor


class Finding(NamedTuple):
    """One finding about a profile: a number, its meaning, a detail to compare it with, and what to do next.

    `heads` are the rows of `Profile.heads` that the number counts; `statistic` the column that it averages.
    """

    value: str
    label: str
    detail: str
    steps: tuple[Step, ...] = ()
    heads: tuple[int, ...] = ()
    statistic: str = ""

    def __str__(self) -> str:
        return f"{self.value} {self.label}. {self.detail}"


class FindingList(list[Finding]):
    """Findings, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        cells = ("".join(f"<td>{html.escape(x)}</td>" for x in (one.value, one.label, one.detail)) for one in self)
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


class Findings:
    """The sentences about one group of a profile, or about one of its texts.

    Args:
        data: the data set of the group.
        attrs: the attributes of the profile, from which the commands of next steps are made.
        group: the name of the group.

    >>> import qkv
    >>> profile = qkv.profile("minilm", "The keeper kept two logbooks.", progress=False)
    >>> found = Findings(profile.data, profile.attrs)
    >>> found.all[0].label
    'heads have an attention sink at the first token ([CLS]) in this text of 9 tokens'
    """

    def __init__(self, data: xr.Dataset, attrs: Mapping[str, Any] | None = None, group: str = "self") -> None:
        self._data = data
        self._attrs = attrs or {}
        self._group = group
        self._longest = int(data["n_queries"].max())

    @cached_property
    def types(self) -> pd.DataFrame:
        """The type of each head: see `Profile.types`."""
        return type_table(self._data)

    @cached_property
    def _heads(self) -> pd.DataFrame:
        return tables.head_table(self._data)

    @cached_property
    def kinds(self) -> dict[str, int]:
        """The number of heads of each type: sinks of the first token first, then the most common, mixed heads last."""
        counts = self.types["type"].value_counts(sort=False)
        order = sorted(counts.index, key=lambda kind: (kind == MIXED, kind != "first token", -counts[kind]))
        return {str(kind): int(counts[kind]) for kind in order}

    @cached_property
    def headline(self) -> str:
        """One sentence: heads with a sink at the first token, induction heads, and the most common other types.

        The types come first if the text is too short to tell sinks.
        """
        total = len(self.types)
        others = [(kind, n) for kind, n in self.kinds.items() if kind != "first token"]
        others = sorted(others, key=lambda one: one[0] != "induction")[:3]  # the type that people ask for
        if MIXED in self.kinds and MIXED not in dict(others):
            others[-1] = (MIXED, self.kinds[MIXED])
        rest = listed([f"{n:,} {_DOES[kind][n != 1]}" for kind, n in others]) if others else ""
        if total == 1:
            rest = self._only_head
        plain = f"{counted(total, 'head')}{': ' if rest else ''}{rest}"
        if tables.is_short(self._data):
            probed = [(kind, n) for kind, n in others if kind != MIXED]
            rest = listed([f"{n:,} {_DOES[kind][n != 1]} on test texts" for kind, n in probed]) if probed else ""
            said = f"{counted(total, 'head')}{': ' if rest else ''}{rest}"
            return f"{said}; too short to tell sinks and other types: {self.window}."
        if self.sink_counts is None:
            return f"{plain}."
        if self.is_too_short:
            return f"{plain}; too short to tell sinks at {first_token(self._data)}: {self.window}."
        prefix, whole = self.sink_counts
        sinks = f"{prefix:,} of {counted(total, 'head')} {_has(prefix)} an attention sink at {first_token(self._data)}"
        sinks = f"{sinks} in {self.window}{self.whole_clause}"
        if not prefix and not whole:
            sinks = f"None of {counted(total, 'head')} has an attention sink at {first_token(self._data)}"
        return f"{sinks}{'; ' if rest else ''}{rest}."

    @property
    def _only_head(self) -> str:
        """What the only head of a group does: its type, and over how many keys it spreads the weight of a query."""
        kind, keys = str(self.types["type"].iloc[0]), float(self._heads["effective_keys"].iloc[0])
        among = float(self._data["n_keys"].mean())
        does = "" if kind in (MIXED, "first token") else f"{_DOES[kind][0]}, and "
        return f"it {does}spreads a query's weight over {keys:.1f} of {among:,.0f} keys on average"

    @property
    def whole_clause(self) -> str:
        """ " (none over all 321 tokens)": the heads with a sink over the whole text; "" for a short text."""
        if self.sink_counts is None or not self.is_long:
            return ""
        return f" ({self.sink_counts[1] or 'none'} over {self._whole})"

    @property
    def is_long(self) -> bool:
        return self._longest > self._prefix

    @property
    def _prefix(self) -> int:
        """The number of queries over which the sink score of the first token is a mean: 64, or all of a short text."""
        return int(self._data.sizes.get("prefix_key", 64))

    @property
    def window(self) -> str:
        if self.is_long:
            return f"the first {self._prefix} {self._nouns}"
        several = self._data.sizes["text"] > 1
        return "these texts" if several else f"this text of {counted(self._longest, 'token')}"

    @property
    def _whole(self) -> str:
        several = self._data.sizes["text"] > 1
        return "the whole texts" if several else f"all {self._longest:,} {self._nouns}"

    @property
    def _nouns(self) -> str:
        """ "tokens", or "queries" if these are the tokens of another text than the keys."""
        return "queries" if self._group == "cross" else "tokens"

    @cached_property
    def _sink_table(self) -> pd.DataFrame | None:
        return sinks.sink_table(self._data) if "visible_queries" in self._data else None

    @cached_property
    def sink_counts(self) -> tuple[int, int] | None:
        """The number of heads with a sink at the first token: over the first 64 queries, and over the whole text.

        None if they were not measured.
        """
        if self._sink_table is None or self._sink_table["alpha_first"].isna().all():
            return None
        prefix, whole = (int((self._sink_table[f"alpha_{name}"] > sinks.EPSILON).sum()) for name in ("first", "whole"))
        return prefix, whole

    @property
    def is_too_short(self) -> bool:
        """True if rows of even weights would already count as a sink at the first token."""
        return self._sink_table is not None and bool(self._sink_table["alpha_even"].mean() > sinks.EPSILON)

    @cached_property
    def sinks(self) -> Finding | None:
        """Attention sinks at the first token, and their trend by length; None if they were not measured."""
        table, found, data = self._sink_table, self.sink_counts, self._data
        if table is None or found is None:
            return None
        prefix, whole = found
        total, even = len(table), table["alpha_even"].mean()
        details = [
            f"Counted are heads whose mean weight on it is above {percent(sinks.EPSILON)}; even attention would give "
            f"{percent(even)}"
        ]
        if self.is_too_short:
            label = f"too short to say whether a head has an attention sink at {first_token(data)}: {self.window}"
            return Finding("–", label, _sentences([*details, "Pass a longer text"]))
        if self.is_long:
            several = f"{whole:,} {'head' if whole == 1 else 'heads'} {_has(whole)}" if whole else "no head has"
            details.append(f"Over {self._whole}, {several} a sink")
            if trend := self._trend():
                details.append(trend)
        controls = [
            f"{counted(int((table[f'alpha_{column}'] > sinks.EPSILON).sum()), 'head')} on {words}"
            for column, words in (("random", "random tokens"), ("repeated", "one token repeated"))
            if table[f"alpha_{column}"].notna().any()
        ]
        if controls:
            special = data.attrs["special_tokens"]
            begin = sorted({name for name in data["key_token"].values[:, 0] if name in special})
            after = f", each text after {listed(begin)}" if begin else ""
            details.append(f"The same on texts without meaning: {listed(controls)}{after}")
        if added := self._added():
            details.append(added)
        label = f"{_noun(total, prefix)} an attention sink at {first_token(data)} in {self.window}"
        strongest = _row(table, "alpha_first")
        kind = "sinks" if prefix or whole else "map"
        counted_heads = _rows(table["alpha_first"] > sinks.EPSILON)
        return Finding(
            f"{prefix:,} of {total:,}", label, _sentences(details), self._steps(kind, strongest), counted_heads
        )

    @property
    def first_step(self) -> Step:
        """Look at the most telling head: see `tables.telling_heads`."""
        layer, head = tables.telling_heads(self._data)[0]
        return self._steps("map", self.types.iloc[layer * self._data.sizes["head"] + head])[0]

    def _steps(self, kind: str, head: pd.Series) -> tuple[Step, ...]:
        """The steps after a finding of one kind, about the head of a row of a table.

        Profiles made by a command get commands; other profiles get Python, in which `model`, `inputs` and `tokenizer`
        are those of `qkv.profile`. Eviction and ablation need a causal language model.
        """
        layer, number, given = int(head["layer"]), int(head["head"]), self._attrs.get("arguments")

        def step(purpose: str, python: str, name: str, *options: str) -> Step:
            return Step(purpose, python if given is None else _command(given, name, options))

        def evict(purpose: str, *policies: str) -> Step:
            python = f"qkv.profiler.eviction(model, inputs, policies={list(policies)!r}, tokenizer=tokenizer)"
            return step(purpose, python, "evict", "--policies", ",".join(policies))

        other = self._group not in ("self", "decoder")
        python = f"profile.plot.map({layer}, {number}{f', group={self._group!r}' if other else ''})"
        options = ["--layer", str(layer), "--head", str(number), *(["--group", self._group] if other else [])]
        shown = step(f"see L{layer} · H{number}", python, "map", *options)._replace(layer=layer, head=number)
        if not self._data.attrs["causal"] or self._group != "self" or kind == "map":
            return (shown,)
        if kind == "distance" and self._longest <= SMALLEST_CACHE:
            return (shown,)
        if kind == "distance":
            return shown, evict("keep only the last keys in the cache", "window")
        python = 'qkv.profiler.ablation(model, inputs, what="sinks", tokenizer=tokenizer)'
        hide = step("hide the first token from one head at a time", python, "ablate", "--what", "sinks")
        if self._longest <= SMALLEST_CACHE:
            return shown, hide
        return shown, hide, evict("evict the first tokens from the cache", "window", "sinks")

    def _added(self) -> str:
        """What the value of the first token adds in the heads with a sink there, as measured; "" if it was not."""
        table = self._sink_table
        assert table is not None
        if not {"value_norm_first", "contribution_first"} <= set(table):
            return ""
        rows = table[table["alpha_first"] > sinks.EPSILON]
        norm, share = rows["value_norm_first"].median(), rows["contribution_first"].median()
        if not (np.isfinite(norm) and np.isfinite(share)):
            return ""
        little, short = share <= ADDS_LITTLE, norm < SHORT
        still = "only " if little else "still " if short else ""
        return (
            f"In the median of these heads, the norm of its value is {written(norm, 'ratio')} × the mean of the other "
            f"tokens, and its contribution, the norm of weight × value, is {still}{percent(share)} of the sum over keys"
        )

    def _trend(self) -> str:
        """How the weight on the first token changes with the position of the query; "" if there is no such order."""
        trend = sinks.sink_trend(self._data)
        if not self._data.attrs["causal"] or len(trend) < 2 or trend["share"].isna().any():
            return ""
        first, last = float(trend["share"].iloc[0]), float(trend["share"].iloc[-1])
        verb = "falls" if last < FADES * first else "rises" if FADES * last > first else "stays near"
        if verb == "stays near":
            return f"The mean weight of all heads on it stays near {percent(first)}"
        rows = list(trend.itertuples())
        if len(rows) > 4:
            rows = [rows[0], rows[len(rows) // 2], rows[-1]]
        shares = [f"{percent(row.share)} ({row.first:,}–{row.last:,})" for row in rows]
        return (
            f"By position of the query, the mean weight of all heads on it {verb} from {shares[0]} to "
            f"{listed(shares[1:])}"
        )

    @cached_property
    def all(self) -> FindingList:
        """All findings, the most important first."""
        data, heads = self._data, self._heads
        shares = {name: float(np.nanmean(share)) for name, share in tables.destinations(data).items()}
        found = [self.sinks, self._other_sinks(), self._copies(), self._first_share(shares["first"])]
        if shares["sink_logit"] > 0:
            meaning = "of all attention goes to the learned sink"
            detail = "No token receives this weight."
            found.append(Finding(percent(shares["sink_logit"]), meaning, detail, statistic="sink_mass"))
        found += [self._special(shares["special"]), self._typed() if len(self.types) > 1 else None]
        entropy, keys = heads["entropy"].median(), round(np.exp(heads["entropy"].median()))
        shared = "one key had all the weight" if keys == 1 else f"{keys:,} keys shared the weight evenly"
        found.append(
            Finding(
                written(heads["entropy_ratio"].median(), "ratio"),
                "of the largest possible entropy, in the median head",
                f"The entropy is {written(entropy, 'nats')}, as if {shared}.",
                statistic="entropy_ratio",
            )
        )
        found.append(self._distance())
        if self.is_too_short:
            found.append(found.pop(0))
        found += [self._without_map(), self._differential()]
        found[:0] = [self._hidden(), self._question(), self._image()]
        return FindingList(one for one in found if one is not None)

    def _without_map(self) -> Finding | None:
        """Layers in which nothing attends: recurrent ones, convolutions, linear attention."""
        kinds: dict[str, str] = self._attrs.get("without_map", {}).get(self._group, {})
        if not kinds:
            return None
        layers = {int(layer): kind for layer, kind in kinds.items()}
        by_kind = {kind: sorted(n for n, of in layers.items() if of == kind) for kind in dict.fromkeys(layers.values())}
        parts = [f"{sinks.ranges(np.array(x))}{f' ({kind})' if kind else ''}" for kind, x in by_kind.items()]
        total = len(layers) + self._data.sizes["layer"]
        return Finding(f"{len(layers):,} of {total:,}", "layers have no attention map", f"Layers {listed(parts)}.")

    def _differential(self) -> Finding | None:
        """Layers that subtract one softmax from another: neither map is what acts."""
        known: dict[str, float] = self._attrs.get("differential", {}).get(self._group, {})
        factors = {layer: x for layer, x in known.items() if int(layer) in self._data["layer"]}
        if not factors:
            return None
        half = self._data.sizes["head"] // 2
        detail = ", ".join(f"layer {layer}: λ = {factor:.2f}" for layer, factor in [*factors.items()][:4])
        return Finding(
            f"{len(factors):,} of {self._data.sizes['layer']:,}",
            f"layers subtract maps: what acts is that of head h below {half} less λ × that of head h + {half}",
            f"{detail}{' …' if len(factors) > 4 else ''}. Shares and types are those of each softmax alone.",
        )

    def _hidden(self) -> Finding | None:
        """Linear attention, whose weights no step of the layer computes."""
        if "negative" not in self._data:
            return None
        return Finding(
            percent(float(np.nanmean(self._data["negative"].values))),
            "of the absolute weight in linear attention is negative",
            "The hidden maps: what factor each value has in the output before its norm and gate. Shares and types are "
            "those of absolute weights.",
        )

    def _question(self) -> Finding | None:
        """What the last token of a chat looks at, from which the answer begins: question, first token, template."""
        question, data = self._attrs.get("arguments", {}).get("chat"), self._data
        if not question or "weights" not in data or not np.isfinite(data["weights"].values[0]).all():
            return None
        n = int(data["n_keys"][0])
        tokens = [tables.plain(token) for token in data["key_token"].values[0, :n]]
        begins = np.cumsum([0, *map(len, tokens)])
        begin = "".join(tokens).rfind(question)
        if begin < 0:
            return None
        asked = (begins[1:] > begin) & (begins[:-1] < begin + len(question))
        last = data["weights"].values[0, ..., n - 1, :n].astype(np.float64) / tables.divisors(data)[0, ..., n - 1, None]
        row, of_heads = last.mean((0, 1)), last[..., asked].sum(-1).ravel()
        share, first = row[asked].sum(), row[0]
        strongest = sorted(np.flatnonzero(asked), key=lambda at: -row[at])[:3]
        named = listed([f"“{tokens[at].strip()}” {percent(row[at])}" for at in strongest])
        return Finding(
            percent(share),
            "of the attention that begins the answer is on the question",
            f"Mean of all heads at the last token of the chat: {named}; {percent(first)} on {first_token(data)}; "
            f"{percent(1 - share - first)} on the rest, the template.",
            self._steps("map", self._heads.iloc[int(of_heads.argmax())]),
            _rows(of_heads > share),
        )

    def _image(self) -> Finding | None:
        """What tokens of text attend to in an image."""
        if "image" not in self._data:
            return None
        table = images.share_table(self._data, "head")
        whole = table["image"] + table["image_sinks"]
        mean, best = table.mean(), table.iloc[int(table["image"].to_numpy().argmax())]
        layer, head, share = int(best["layer"]), int(best["head"]), best["image"]
        rows = "the text's" if self._group == "text" else "all"
        return Finding(
            percent(whole.mean()),
            f"of {rows} attention is on patches of the image",
            f"Mean of all heads, of which {percent(mean['image_sinks'])} on patches that are sinks of the head; "
            f"{percent(mean['sink'])} on {first_token(self._data)} and learned sinks, {percent(mean['text'])} on the "
            f"rest. Most on patches that are no sinks: {percent(share)}, in L{layer} · H{head}.",
            self._steps("map", best),
            _rows(whole > whole.mean()),
        )

    def _first_share(self, share: float) -> Finding:
        visible = self._data["visible"].values
        detail = f"Even attention would put {percent(float((1 / visible[visible > 0]).mean()))} there"
        if self._sink_table is not None and self._sink_table["contribution_first"].notna().any():
            added = float(self._sink_table["contribution_first"].mean())
            detail += f". Its contribution, the norm of weight × value, is {percent(added)} of the sum over keys"
        label = f"of all attention goes to {first_token(self._data)}"
        return Finding(percent(share), label, f"{detail}.", statistic="sink")

    def _other_sinks(self) -> Finding | None:
        """Sinks at other tokens than the first."""
        if self._sink_table is None:
            return None
        table = sinks.sink_tokens(self._data)
        table = table[table["position"] > 0]
        if table.empty:
            return None
        scores = sink_scores(self._data)
        assert scores is not None
        with np.errstate(invalid="ignore"):
            chosen = (scores[..., 1:] > sinks.EPSILON).any((0, 3)).ravel()
        number, typed = int(chosen.sum()), int((chosen & (self.types["type"] == "other sink")).sum())
        of = tables.names_of(self._data)
        names = [
            f"“{of[row.token]}” ({getattr(row, 'place', 'text').replace('text', f'position {row.position:,}')})"
            for row in table.head(3).itertuples()
        ]
        more = f" and {len(table) - 3:,} more" if len(table) > 3 else ""
        best = scores[..., 1:]
        strongest = np.nan_to_num(best, nan=-1.0).max((0, 3)).argmax()
        return Finding(
            f"{number:,} of {len(self.types):,}",
            f"{_noun(len(self.types), number)} a sink at another token, over {self._whole}",
            f"The tokens: {', '.join(names)}{more}. {typed:,} of the heads {'is' if typed == 1 else 'are'} of the type "
            "“other sink”, the rest of a type that is tested before it.",
            self._steps("map", self.types.iloc[int(strongest)]),
            _rows(chosen),
        )

    def _copies(self) -> Finding | None:
        """Heads that put much weight on all copies of one ordinary token, none of which need be a sink."""
        names, share, count = tables.repeated_shares(self._data)
        if not names:
            return None
        best, largest = share.argmax(1), share.max(1)
        chosen = largest > sinks.EPSILON
        if not chosen.any():
            return None
        parts = []
        for token in sorted(set(best[chosen]), key=lambda token: -(chosen & (best == token)).sum())[:3]:
            heads = self._heads[chosen & (best == token)]
            layers = np.unique(heads["layer"])
            of = f"layer{'' if len(layers) == 1 else 's'} {sinks.ranges(layers)}"
            parts.append(
                f"“{names[token]}” ({count[token]:,} copies: {counted(len(heads), 'head')} of {of}, up to "
                f"{percent(largest[chosen & (best == token)].max())})"
            )
        return Finding(
            f"{chosen.sum():,} of {len(chosen):,}",
            f"{_noun(len(chosen), int(chosen.sum()))} more than {percent(sinks.EPSILON)} of the weight on the copies "
            "of one token",
            f"The tokens: {listed(parts)}.",
            self._steps("map", self._heads.loc[int(largest.argmax())]),
            _rows(chosen),
        )

    def _special(self, share: float) -> Finding | None:
        special = tables.special_keys(self._data)
        special[:, 0] = False
        if not special.any():
            return None
        names, n_keys = sorted(set(self._data["key_token"].values[special])), float(self._data["n_keys"].mean())
        return Finding(
            percent(share),
            "of all attention goes to other special tokens",
            f"{listed(names[:4])}: {special.sum(1).mean():.0f} of {n_keys:,.0f} keys.",
            heads=_rows(tables.destinations(self._data)["special"].mean(0).ravel() > share),
        )

    def _typed(self) -> Finding:
        total, named = len(self.types), {kind: n for kind, n in self.kinds.items() if kind != MIXED}
        detail = " · ".join(f"{n:,} {kind}" for kind, n in named.items()) or "No score reaches its threshold"
        label = "heads have one clear type" + (" on test texts" if tables.is_short(self._data) else "")
        found, steps = self.sink_counts, tuple[Step, ...]()
        if tables.is_short(self._data):
            detail += f". {self.window[0].upper()}{self.window[1:]} is too short for types that it would tell itself"
        elif found is not None and not self.is_too_short and found[0] != self.kinds.get("first token", 0):
            typed, earlier = self.kinds.get("first token", 0), found[0] - self.kinds.get("first token", 0)
            detail += (
                f". Heads with a sink at the first token: {typed:,} of that type + {earlier:,} of a type that is "
                f"tested before it = {found[0]:,}"
            )
        if self.is_long:
            whole = type_table(self._data, whole=True)["type"].value_counts()
            kinds = " · ".join(f"{n:,} {kind}" for kind, n in whole.items() if kind != MIXED) or "none"
            if whole.get("first token", 0) != self.kinds.get("first token", 0):
                detail += f". With sinks over {self._whole}: {kinds}"
        chosen = [kind for kind in ("induction", "previous token", "local", "delimiter", "self") if kind in named]
        if chosen:
            rows = self.types[self.types["type"] == chosen[0]]
            steps = self._steps("map", _row(rows, chosen[0]))
        return Finding(
            f"{sum(named.values()):,} of {total:,}", label, f"{detail}.", steps, _rows(self.types["type"] != MIXED)
        )

    def _distance(self) -> Finding | None:
        heads = self._heads
        if not heads["distance"].notna().any():
            return None
        near, far = heads.loc[heads["distance"].idxmin()], heads.loc[heads["distance"].idxmax()]
        return Finding(
            written(heads["distance"].median(), "tokens"),
            "between query and key, in the median head",
            f"From {written(near['distance'], 'tokens')} ({head_name(near)}) "
            f"to {written(far['distance'], 'tokens')} ({head_name(far)}).",
            self._steps("distance", far),
            statistic="distance",
        )


def head_name(row: pd.Series) -> str:
    """The short name of a head: "L3 · H7"."""
    return f"L{row['layer']} · H{row['head']}"


def first_token(data: xr.Dataset) -> str:
    """The first token in words, with its name if it is a special token and the same in every text."""
    names = set(data["key_token"].values[:, 0])
    name = names.pop()
    known = not names and name in data.attrs["special_tokens"]
    return f"the first token ({name})" if known else "the first token"


def listed(parts: list[str]) -> str:
    """ "a, b and c" """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _rows(chosen: Any) -> tuple[int, ...]:
    """The places of the heads that are chosen."""
    return tuple(np.flatnonzero(chosen).tolist())


def _has(count: int) -> str:
    return "has" if count == 1 else "have"


def _noun(total: int, count: int) -> str:
    """ "heads have", or "head has" of a model with one head."""
    return f"{'head' if total == 1 else 'heads'} {_has(1 if total == 1 else count)}"


def _sentences(parts: list[str]) -> str:
    return ". ".join(parts) + "."


def _row(table: pd.DataFrame, column: str) -> pd.Series:
    """The row with the largest value of a column."""
    values = table[column].fillna(-np.inf)
    return table.loc[values.idxmax()]
