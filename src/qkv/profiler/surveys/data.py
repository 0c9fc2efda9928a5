"""`Survey`: the accumulated attention of a model over a corpus, its tables and findings, and its file."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv._files import opened, write_atomically
from qkv._untrusted import check_version, parse_array, parse_json, read_zip, reading
from qkv.errors import InputError
from qkv.profiler.data.findings import Finding, FindingList
from qkv.profiler.data.frames import percent
from qkv.profiler.data.tables import MIXED, ROLES, SINK_THRESHOLD, readable
from qkv.profiler.surveys.accumulators import (
    PREFIX,
    QUANTITIES,
    Group,
    Layer,
    Quantities,
    joined,
    limbs,
    number,
    of_description,
)

if TYPE_CHECKING:
    import pandas as pd

FORMAT, VERSION = "qkv-survey", 1
QUANTILES = (0.05, 0.5, 0.95)
TYPES = {"previous token": "previous", "self": "self", "first token": "sink_score", "uniform": "entropy_ratio"}
"""Types of heads, in their order, that means tell; and the column of `Survey.heads` that does."""
EXAMPLES = 20
"""Number of texts that were left out whose names are kept."""
_DATE = (1980, 1, 1, 0, 0, 0)  # fixed, so that equal surveys give equal files
TOKEN = 40  # bytes of memory for each token of the vocabulary


class Survey:
    """Accumulated attention of a model over a corpus, head by head.

    Args:
        definition: the model, the settings and the quantities; created by `qkv.profiler.survey`. Only surveys with
            equal definitions can be merged.
        groups: the accumulators, one `qkv.profiler.surveys.accumulators.Group` for each kind of attention.
        record: the data: ``documents``, ``sequences`` and ``tokens`` (numbers), ``shards`` (their names), ``skipped``
            (number of texts left out, by reason), ``examples`` (names of some of them), ``names`` (of the tokens that
            received the most weight) and ``sources`` (the source of each module's statistics: see `qkv.profile`).

    >>> import tempfile
    >>> from qkv.profiler import survey
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = survey("qkv-mini", ["import os", "import sys"], out=folder, shards=1)
    >>> found
    Survey('qkv-mini', 2 documents, 6 tokens)
    """

    def __init__(self, definition: dict[str, Any], groups: dict[str, Group], record: dict[str, Any]) -> None:
        self.definition, self.groups, self.record = definition, groups, record

    def __repr__(self) -> str:
        tokens, documents = self.record["tokens"], self.record["documents"]
        return f"Survey({self.definition['model']!r}, {documents:,} documents, {tokens:,} tokens)"

    @property
    def quantities(self) -> Quantities:
        """The quantities measured at every query, by name, in the order of the accumulators' first dimension."""
        return of_description(self.definition["quantities"])

    @property
    def main(self) -> str:
        """The name of the main group: "decoder" if there is one, else the first group."""
        return "decoder" if "decoder" in self.groups else next(iter(self.groups))

    def group(self, name: str | None = None) -> Group:
        """The accumulators of one kind of attention; the main one if None."""
        name = self.main if name is None else name
        if name not in self.groups:
            raise InputError(f"group: got {name!r}; this survey has {', '.join(map(repr, self.groups))}")
        return self.groups[name]

    def heads(self, group: str | None = None) -> pd.DataFrame:
        """One row per layer and head, over all counted queries of the corpus; NaN where a quantity is not defined.

        Weights are shares of the row, as in profiles (docs/quantities.md); ``sink`` and ``previous`` leave out the
        first query of every sequence.

        Columns: layer, head, module, queries; for each of `quantities`, in its unit, the mean
        under its name, and ``_std``, ``_min``, ``_max``, ``_p5``, ``_p50``, ``_p95`` (quantiles over queries, exact to
        a bin of the histogram), ``_text_p5``, ``_text_p50``, ``_text_p95`` (quantiles over the means of sequences, from
        t-digests); special and delimiter (shares of the weight on special tokens and delimiters); sink_score (mean
        sink score of the first key) and sink_texts (share of texts where it is above 0.3, among texts of 64 tokens
        or more).
        """
        import pandas as pd

        frames = []
        for at, layer in sorted(self.group(group).layers.items()):
            columns: dict[str, Any] = {"layer": at, "head": np.arange(layer.heads), "module": layer.module}
            columns["queries"] = layer.added["queries"]
            found = {"": layer.mean(), "_std": layer.deviation()}
            measured = layer.added["count"] > 0
            found["_min"], found["_max"] = (np.where(measured, x, np.nan) for x in (layer.minimum, layer.maximum))
            found |= {f"_p{100 * rank:.0f}": layer.quantile(rank) for rank in QUANTILES}
            found |= {f"_text_p{100 * rank:.0f}": layer.quantile_of_texts(rank) for rank in QUANTILES}
            for q, name in enumerate(self.quantities):
                columns |= {f"{name}{suffix}": x[q] for suffix, x in found.items()}
            _, special, delimiter = number(layer.added["received"]) / np.maximum(layer.added["queries"], 1)
            columns |= {"special": special, "delimiter": delimiter}
            with np.errstate(divide="ignore", invalid="ignore"):
                columns["sink_score"] = number(layer.added["early_sum"])[:, 0] / layer.added["early_count"]
                columns["sink_texts"] = layer.added["early_sinks"][:, 0] / layer.added["early_count"]
            frames.append(pd.DataFrame(columns))
        return pd.concat(frames, ignore_index=True)

    def types(self, group: str | None = None) -> pd.DataFrame:
        """The type of each head by its means: the columns layer, head, type, and the score of each type.

        The type is the first of `TYPES` whose mean reaches the threshold of profiles, else "mixed". Types that need
        synthetic texts or single tokens, such as induction, are told by a profile.
        """
        table, names = self.heads(group), {name: kind for kind, name in TYPES.items()}
        table["sink_score"] = table["sink_score"].fillna(table["sink"])  # no text has 64 tokens
        scores = table[["layer", "head", *names]].rename(columns=names)
        reached = np.stack([scores[kind].to_numpy() >= ROLES[kind].threshold for kind in TYPES])
        reached &= not self._is_short(table)
        kinds = np.array([*TYPES, MIXED], object)
        scores.insert(2, "type", kinds[np.where(reached.any(0), reached.argmax(0), len(TYPES))])
        return scores

    def _is_short(self, table: pd.DataFrame) -> bool:
        """Whether rows of even weights alone would make the first token a sink in a text of mean length."""
        return bool(self.record["tokens"] < self.record["documents"] * (4 if table["next"].any() else 10))

    def findings(self, group: str | None = None) -> FindingList:
        """What the means over the corpus say, a number and its meaning each; the first one is the headline."""
        table, types, most = self.heads(group), self.types(group), self.tokens(1, group)
        n_texts, per_text = self.record["documents"], self.record["tokens"] / self.record["documents"]
        over_texts = f"over {n_texts:,} text{'s' * (n_texts != 1)}"
        what = f"heads have an attention sink at the first token, on average {over_texts}"
        if self._is_short(table):
            what = f"heads put more than 30 % on the first token {over_texts} of {per_text:.0f} tokens on average, too "
            what += "short to tell sinks and types"
        kinds, caught = types["type"], np.flatnonzero(types["first token"] > SINK_THRESHOLD)
        over = "all queries after the first" if table["sink_score"].isna().all() else f"the first {PREFIX} queries"
        found = [
            Finding(
                f"{len(caught):,} of {len(table):,}",
                what,
                f"Counted are heads whose mean weight on it, over {over}, is above 30 %.",
                heads=tuple(caught.tolist()),
            ),
            Finding(
                f"{(kinds != MIXED).sum():,} of {len(table):,}",
                "heads have one clear type",
                ", ".join(f"{n:,} {kind}" for kind, n in kinds.value_counts().items()) + ".",
            ),
            Finding(
                f"{table['entropy_ratio'].median():.2f}",
                "of the largest possible entropy, in the median head",
                f"From {table['entropy_ratio'].min():.2f} to {table['entropy_ratio'].max():.2f}.",
            ),
        ]
        if len(most) and most["token"].iloc[0]:
            name = readable(most["token"].iloc[0])
            lift = f"{most['lift'].iloc[0]:.1f} × its share of the tokens."
            found.append(Finding(percent(most["share"].iloc[0]), f"of all attention goes to “{name}”", lift))
        return FindingList(found)

    def sinks(self, group: str | None = None) -> pd.DataFrame:
        """One row for each of the first 64 keys of a text.

        Columns: key; score (mean sink score over texts and heads: the weight on the key, averaged over those of the
        text's first 64 queries that may attend to it) and share (share of texts × heads where it is above 0.3:
        Sink_k^ε of Gu et al. 2025, arXiv:2410.10781, section 3). NaN if no text has 64 tokens.
        """
        import pandas as pd

        layers = self.group(group).layers.values()
        pairs = sum(int(x.added["early_count"].sum()) for x in layers)
        total = sum(number(x.added["early_sum"].sum(0)) for x in layers)
        sinks = sum(x.added["early_sinks"].sum(0) for x in layers)
        with np.errstate(divide="ignore", invalid="ignore"):
            return pd.DataFrame({"key": np.arange(PREFIX), "score": total / pairs, "share": sinks / pairs})

    def tokens(self, k: int = 10, group: str | None = None) -> pd.DataFrame:
        """The `k` tokens of the vocabulary that received the most weight.

        Columns: id; token (its name, "" if it is not kept); share (of all weight on keys, averaged over layers and
        heads); lift (share divided by the token's share of the keys); count (number of keys with this token).
        """
        import pandas as pd

        if k < 1:
            raise InputError(f"k: got {k}; expected a positive number of tokens")
        found = self.group(group)
        weight, count = number(found.token_weight), found.token_count
        best = np.argsort(-weight, kind="stable")[:k]
        best = best[count[best] > 0]
        share = weight[best] / weight.sum()
        return pd.DataFrame(
            {
                "id": best,
                "token": [self.record["names"].get(str(i), "") for i in best],
                "share": share,
                "lift": share / (count[best] / count.sum()),
                "count": count[best] // len(found.layers),
            }
        )

    def merge(self, other: Survey) -> Survey:
        """The merged survey; neither is changed. Sums, counts and histograms are exact in any order.

        The definitions must be equal, and no part of a corpus may be in both.
        """
        if (difference := differing(self.definition, other.definition)) is not None:
            name, value, other_value = difference
            raise InputError(
                f"other has another definition, so the surveys cannot be merged: {name} is {value} and {other_value}"
            )
        twice = sorted({*self.record["shards"]} & {*other.record["shards"]})
        if twice:
            raise InputError(f"other contains {twice[0]}, as this survey does; it would count twice")
        cut = {name.rpartition(" ")[2]: name.split()[3] for name in self.record["shards"]}
        for name in other.record["shards"]:
            corpus, number = name.rpartition(" ")[2], name.split()[3]
            if cut.get(corpus, number) != number:
                raise InputError(
                    f"other has the corpus {corpus} in {number} shards, and this survey in {cut[corpus]}, so texts "
                    "could count twice; expected the same number of shards"
                )
        groups = dict(self.groups)
        for name, group in other.groups.items():
            groups[name] = groups[name].merge(group) if name in groups else group
        return Survey(self.definition, groups, _merged(self.record, other.record))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the survey atomically to one file (a zip of JSON and NumPy arrays) and return its path."""
        target = Path(path)
        write_atomically(target, self.packed())
        return target

    def packed(self) -> bytes:
        """The content of the file that `save` writes; equal surveys give equal bytes."""
        layers = {name: {n: x.module for n, x in g.layers.items()} for name, g in self.groups.items()}
        head = {
            "format": FORMAT, "format_version": VERSION, "definition": self.definition, "record": self.record,
            "groups": layers,
        }  # fmt: skip
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            _put(archive, "survey.json", json.dumps(head, indent=1).encode())
            for name, group in self.groups.items():
                present = np.flatnonzero(group.token_count)
                tokens = {"id": present, "count": group.token_count[present]} | limbs(group.token_weight[present])
                for what, x in tokens.items():
                    _put_array(archive, f"{name}/tokens/{what}", x)
                for at, layer in group.layers.items():
                    for what, x in layer.arrays():
                        _put_array(archive, f"{name}/{at}/{what}", x)
        return file.getvalue()

    @classmethod
    def load(cls, path: str | os.PathLike[str] | io.BytesIO) -> Survey:
        """Read a file that `save` wrote, also at an address such as ``s3://…``, or its bytes."""
        source = path if isinstance(path, io.BytesIO) else opened(path, "path")
        with reading("the data" if isinstance(path, io.BytesIO) else path, "a survey"):
            members, budget = read_zip(source, "survey.json")
            head = parse_json(members["survey.json"])
            if head.get("format") != FORMAT:
                raise ValueError(f"its format is {str(head.get('format'))[:80]!r}, expected {FORMAT!r}")
            check_version(head, VERSION)
            definition = head["definition"]
            quantities = of_description(definition["quantities"])
            if [name for name in quantities if name in QUANTITIES] != [*QUANTITIES]:
                raise ValueError("its quantities are not those of this version, in their order")
            for _ in head["groups"]:
                budget.take(definition["vocabulary"] * TOKEN)
            groups = {
                name: _read_group(members, name, layers, definition["vocabulary"], quantities)
                for name, layers in head["groups"].items()
            }
            _check_record(head["record"], definition)
        return cls(head["definition"], groups, head["record"])


def differing(a: Mapping[str, Any], b: Mapping[str, Any], where: str = "") -> tuple[str, Any, Any] | None:
    """The first entry in which two nested mappings differ: its dotted name and both values; None if they are equal."""
    for name in [*a, *(n for n in b if n not in a)]:
        x, y = a.get(name), b.get(name)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            if (found := differing(x, y, f"{where}{name}.")) is not None:
                return found
        elif name not in a or name not in b:
            return (f"{where}{name}", *(("present", "missing") if name in a else ("missing", "present")))
        elif x != y:
            return f"{where}{name}", x, y
    return None


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    skipped = {r: a["skipped"].get(r, 0) + b["skipped"].get(r, 0) for r in sorted({*a["skipped"], *b["skipped"]})}
    return {
        **{name: a[name] + b[name] for name in ("documents", "sequences", "tokens", "shards")},
        "skipped": skipped,
        "examples": (a["examples"] + b["examples"])[:EXAMPLES],
        "names": a["names"] | b["names"],
        "sources": a["sources"] | b["sources"],
    }


def _put(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_DEFLATED)


def _put_array(archive: zipfile.ZipFile, name: str, x: np.ndarray) -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(x), allow_pickle=False)
    _put(archive, f"{name}.npy", file.getvalue())


def _read_group(
    members: Mapping[str, bytes], name: str, layers: dict[str, str], vocabulary: int, quantities: Quantities
) -> Group:
    found: dict[str, dict[str, np.ndarray]] = {}
    for member, data in members.items():
        if member.startswith(f"{name}/"):
            _, part, what = member.removesuffix(".npy").split("/")
            found.setdefault(part, {})[what] = parse_array(data)
    group = Group(vocabulary)
    tokens = found.pop("tokens")
    if tokens["id"].size and not 0 <= tokens["id"].min() <= tokens["id"].max() < vocabulary:
        raise ValueError(f"it has tokens outside the vocabulary of {vocabulary}")
    group.token_weight[tokens["id"]] = joined(tokens["high"], tokens["low"])
    group.token_count[tokens["id"]] = tokens["count"]
    if set(found) != set(layers):
        raise ValueError("its layers are not those that it declares")
    group.layers = {int(n): Layer.of_arrays(module, found[n], quantities) for n, module in layers.items()}
    return group


def _check_record(record: dict[str, Any], definition: dict[str, Any]) -> None:
    """Raise ValueError if an entry of the header is missing or has another type."""
    kinds = {"documents": int, "sequences": int, "tokens": int, "shards": list, "skipped": dict, "examples": list,
             "names": dict, "sources": dict}  # fmt: skip
    wrong = [name for name, kind in kinds.items() if type(record[name]) is not kind]
    if wrong or not isinstance(definition["model"], str):
        raise ValueError(f"its header is wrong: {', '.join(wrong) or 'model'}")
