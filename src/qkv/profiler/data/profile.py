"""The result of profiling a model: one labelled data set per kind of attention, which can be saved."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np
import xarray as xr

from qkv._untrusted import reading
from qkv.errors import InputError, one_of, refusing
from qkv.profiler.data import archive, frames, images, sinks, tables, variables
from qkv.profiler.data.alignment import Alignment, alignment
from qkv.profiler.data.findings import FindingList, Findings
from qkv.profiler.data.frames import size_of
from qkv.profiler.data.variables import ATTRIBUTES, COORDINATES, VARIABLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import polars as pl


class ProfileData:
    """The numbers of a profile: data sets by kind of attention, tables of them, and files. See `qkv.Profile`."""

    def __init__(
        self,
        groups: dict[str, xr.Dataset],
        attrs: dict[str, Any] | None = None,
        residual: dict[str, xr.Dataset] | None = None,
    ) -> None:
        if not groups:
            raise InputError("groups: got no data set; expected at least one, such as {'self': dataset}")
        self.groups: dict[str, xr.Dataset] = {name: _checked(name, data) for name, data in groups.items()}
        self.residual: dict[str, xr.Dataset] = dict(residual or {})
        self.attrs: dict[str, Any] = dict(attrs or {})
        _check_json("attrs", self.attrs)

    @property
    def main(self) -> str:
        """The name of the main group: "decoder" if there is one, else the first group."""
        return "decoder" if "decoder" in self.groups else next(iter(self.groups))

    @property
    def data(self) -> xr.Dataset:
        """The main group's data set."""
        return self.groups[self.main]

    def group(self, name: str | None = None) -> xr.Dataset:
        """The data set of one group; the main one when `name` is None."""
        name = self.main if name is None else name
        if name not in self.groups:
            raise InputError(f"group: got {name!r}; this profile has {', '.join(map(repr, self.groups))}")
        return self.groups[name]

    @overload
    def heads(self, group: str | None = None, *, frame: Literal["pandas"] = "pandas") -> pd.DataFrame: ...
    @overload
    def heads(self, group: str | None = None, *, frame: Literal["polars"]) -> pl.DataFrame: ...
    def heads(
        self, group: str | None = None, *, frame: Literal["pandas", "polars"] = "pandas"
    ) -> pd.DataFrame | pl.DataFrame:
        """One row per layer and head, averaged over each text's queries and then over the texts.

        Columns: layer, head, module; the mean of every statistic of a query (`qkv.statistics.BUILT_IN`) and of local;
        entropy_ratio; sink_share; top_key, top_key_token, top_key_share (the key that receives the most weight, in the
        text where its share is largest); target, target_share and goes_to (where the head sends its weight, in words);
        and each custom statistic, averaged by its `by_head`. The frame's ``attrs`` have the unit and definition of
        each. ``frame="polars"`` gives a polars frame.

        Shares of the row are comparable between normalizers: a weight is divided by the sum of its row, in which a
        learned sink counts as a key. `sink` and `previous` leave the first query of a text out, in causal models
        because it can attend only to itself, and in others so that both compare.
        """
        data = self.group(group)
        table = frames.described(tables.head_table(data), variables.custom_variables(data))
        return frames.as_frame(table, frame)

    def tokens(self, k: int = 10, group: str | None = None) -> pd.DataFrame:
        """The `k` most attended tokens; all occurrences of a token are counted together.

        Columns: token; share (of all attention, averaged over texts, layers and heads); count (occurrences);
        lift (share divided by the token's share of the keys); text and position of the occurrence that
        receives the most attention.
        """
        if k < 1:
            raise InputError(f"k: got {k}; expected a positive number of tokens")
        return tables.token_table(self.group(group)).head(k)

    def sinks(self, threshold: float = 0.3, group: str | None = None) -> pd.DataFrame:
        """Attention sinks by head: one row per layer and head, averaged over texts.

        Four measures stand side by side, each a mean over the queries after the first: weight_first (the model's own
        weight on the first token), share_first (its share of the row, by which sinks are judged), learned_sink (weight
        on a null key, whose value is 0), and contribution_first (the norm of weight × value of the first
        token, as a share of the sum over keys: Kobayashi et al. 2020, arXiv:2004.10102).
        even_share is the floor, that of even weights, large in short texts.

        Further columns: sink_share (of queries with a share above `threshold`); alpha_first, alpha_even, alpha_whole,
        alpha_random and alpha_repeated (sink scores of the first token: Gu et al. 2025, arXiv:2410.10781); alpha_best,
        best_text, best_key and best_token (the token of the largest score); norms, cosines and angles of keys and
        values. The frame's ``attrs`` define each. Quantities that were not measured are NaN, or have no column.

        Raises:
            InputError: if the threshold is not between 0 and 1, or the profile lacks the statistics that are needed.
        """
        return frames.described(sinks.sink_table(self.group(group), threshold))

    def first_token(self, group: str | None = None) -> pd.DataFrame:
        """The weight on the first token, one row per layer, as shares of the row.

        Columns: layer; mean (over the queries after the first, then over texts and heads); even (the share that rows of
        even weights would give it); strongest_head and strongest_mean (the head with the largest mean); max (the
        largest share of a single query in any head and text). The first query is left out, because in a causal model
        its only key is the first token.

        Raises:
            InputError: if no text has a second token.

        >>> import qkv
        >>> profile = qkv.profile("qkv-mini", "def mean(values):", progress=False, probe=False)
        >>> profile.first_token().shape == (profile.data.sizes["layer"], profile.data.sizes["head"])
        True
        """
        return sinks.first_token_table(self.group(group))

    def sink_trend(self, threshold: float = 0.3, group: str | None = None) -> pd.DataFrame:
        """The weight on the first token by position of the query: whether sinks last over a long text.

        One row per range of positions: 0 to 63, 64 to 127, 128 to 255 and so on. Columns: first and last (the range);
        share (of the row on the first token, mean over the queries of the range, the texts and the heads); even (the
        share that rows of even weights would give it); heads (the number of heads whose own mean is above `threshold`).

        Raises:
            InputError: if the threshold is not between 0 and 1, or the profile lacks the statistics that are needed.

        >>> import qkv
        >>> profile = qkv.profile("qkv-mini", progress=False)
        >>> list(profile.sink_trend()["last"])
        [63, 127, 255, 320]
        """
        return sinks.sink_trend(self.group(group), threshold)

    def findings(self, group: str | None = None) -> FindingList:
        """What the profile says, most important first: the sentences of reports, the viewer and the command line.

        Each finding has a value, a label, a detail to compare it with, and steps: commands or lines of Python that look
        closer at the head in question.

        >>> import qkv
        >>> found = qkv.profile("minilm", progress=False).findings()[0]
        >>> print(found.value, found.label)
        21 of 72 heads have an attention sink at the first token ([CLS]) in the first 64 tokens
        >>> print(found.steps[0].command)
        profile.plot.map(1, 11)
        """
        return Findings(self.group(group), self.attrs, group or self.main).all

    def sink_tokens(self, threshold: float = 0.3, group: str | None = None) -> pd.DataFrame:
        """Tokens that are an attention sink of at least one head; sinks of the most heads come first.

        Columns: text, position, token; heads and share_of_heads (the number and share of heads whose sink score for
        this token, over all queries that may attend to it, is larger than `threshold`); alpha (the largest score);
        layers of these heads; key_norm and value_norm (norm of the token's vectors divided by the mean norm of the
        other tokens' vectors, in these heads). With images, place: "border of the image" or "inside the image" for a
        patch, "border of the thumbnail", "register", "class token", "end of a row" or "text".
        """
        return sinks.sink_tokens(self.group(group), threshold)

    def image_shares(self, by: Literal["head", "token"] = "head", group: str | None = None) -> pd.DataFrame:
        """What tokens of text attend to: the image, its sinks, or the text; in an encoder, what its tokens attend to.

        The four shares sum to 1: image (patches that are no sinks), image_sinks (patches with a mean share above 30 %
        in the head, over the rows that may attend to them), sink (the first token, unless it is a patch, and a learned
        sink) and text (the rest: tokens of text, marks between tiles, registers).

        Args:
            by: ``"head"``, a row for each layer and head, the mean over the tokens of text after the first patch, then
                over texts; ``"token"``, a row for each of these tokens, the mean of all heads, with its text (input),
                position, and the next token, which it chose if it was generated.
            group: the kind of attention; the one whose keys are patches if None.

        Raises:
            InputError: if no keys are patches, or where they are is not known.

        >>> import qkv, torch, transformers
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> config = transformers.ViTConfig(image_size=32, patch_size=8, **sizes)
        >>> pixels = {"pixel_values": torch.rand(1, 3, 32, 32)}
        >>> profile = qkv.profile(transformers.ViTModel(config), pixels, progress=False)
        >>> list(profile.image_shares().columns)
        ['layer', 'head', 'image', 'image_sinks', 'sink', 'text']
        """
        one_of("by", by, ("head", "token"))
        return images.share_table(self.groups[images.group_of(self.groups, self.attrs, group)], by)

    def alignment(
        self,
        heads: Sequence[tuple[int, int]] | None = None,
        *,
        text: int = 0,
        prompt: int | None = None,
        seconds: float | None = None,
        frame: float = 0.02,
        group: str = "cross",
    ) -> Alignment:
        """When each token and word was spoken, by the cross-attention of a speech model such as Whisper.

        The weights of some heads on frames of sound are standardised over the tokens, smoothed over seven frames and
        averaged; dynamic time warping gives each token its frames, as in OpenAI's Whisper and in transformers.

        Args:
            heads: pairs (layer, head) of the decoder. By default those that follow this text, which is found by how
                much of a head's weight is on the frames that it alone would give each token: at most ten heads, with
                at least half the score of the best.
            text: index of the profile's input.
            prompt: number of tokens before the spoken text, which take no part; by default the special tokens at the
                beginning.
            seconds: length of the sound; by default that of all frames, silence included.
            frame: seconds of a frame; Whisper's have 0.02.
            group: the kind of attention.

        Returns:
            `Alignment`, with tables of tokens, words and heads.

        Raises:
            InputError: if the profile keeps no weights of the sound, no head follows the text, or heads, prompt or
                seconds do not fit.

        >>> import qkv
        >>> inputs = {"input_features": sound, "decoder_input_ids": ids}  # doctest: +SKIP
        >>> profile = qkv.profile(whisper, inputs, tokenizer=processor)  # doctest: +SKIP
        >>> profile.alignment(seconds=11.2).words  # doctest: +SKIP
        """
        special = self.groups["decoder"].attrs["special_tokens"] if "decoder" in self.groups else ()
        data = self.one_text(text, group)
        return alignment(data, special, heads, prompt, seconds, frame)

    def types(self, group: str | None = None) -> pd.DataFrame:
        """Head types: one row per layer and head.

        Columns: layer, head; type (the first of `qkv.profiler.data.tables.ROLES` whose score reaches its threshold,
        else "mixed"); traits (all of `TRAITS` whose score does); and all scores by name, NaN where they were not
        measured.
        """
        return frames.described(tables.type_table(self.group(group)))

    def similarity(
        self, text: int | None = None, group: str | None = None, *, maps: Literal["weights", "pooled"] | None = None
    ) -> pd.DataFrame:
        """How much alike the attention maps of two heads are, for all pairs: a symmetric table of heads × heads.

        A number is 1 − the mean over queries of the Jensen-Shannon divergence between the rows of the two heads, in
        bits (Clark et al. 2019, arXiv:1906.04341, section 6): 1 for equal maps, 0 for maps that share no key. Rows are
        shares: a learned sink counts as one more key, and so does the absence of any weight. Queries that may attend to
        one key only are left out. Rows and columns are labelled with (layer, head); ``attrs`` name the maps.

        Args:
            text: index of one text; the mean over all texts if None.
            group: the kind of attention; the main one if None.
            maps: ``"weights"``, all weights, which is exact; ``"pooled"``, the small maps that a profile keeps of any
                text, by which no similarity is less (if rows sum to 1); or None for the most exact that there are. 832
                heads of 256 tokens take minutes with all weights, and seconds with pooled maps of 64 bins.

        Raises:
            InputError: if the profile does not hold the maps, or for negative weights, which have no divergence.

        >>> import qkv
        >>> table = qkv.profile("qkv-mini", "import os\\nimport sys\\n", progress=False).similarity()
        >>> table.shape == (len(table),) * 2, table.attrs["maps"]
        (True, 'weights')
        """
        from qkv.profiler.data.similarity import similarity_table

        return similarity_table(self.one_text(text, group), maps)

    def one_text(self, text: int | None = None, group: str | None = None) -> xr.Dataset:
        """The data set of a group, cut to one text; all texts if None.

        Raises:
            InputError: for a text or a group that the profile does not have.
        """
        data = self.group(group)
        if text is None:
            return data
        if not 0 <= text < data.sizes["text"]:
            raise InputError(f"text: got {text}; this profile has texts 0 to {data.sizes['text'] - 1}")
        return data.isel(text=[text])

    def export(self, path: str | os.PathLike[str], group: str | None = None) -> Path:
        """Write the profile for other programs, in the format of the suffix of `path`; returns the path.

        ``.parquet`` and ``.csv``: one row per head of one group, with the columns of `heads`, `types` and `sinks` (in
        Parquet the unit and definition of a column are in its metadata). The write is atomic. For the whole
        data set of a group in another format, call xarray: ``profile.data.to_zarr(path)``, if zarr is installed.

        Raises:
            InputError: for another suffix, a folder that does not exist, or a library that is not installed.
        """
        table = frames.all_of_heads(
            self.heads(group), self.types(group), self.sinks(group=group), variables.custom_variables(self.group(group))
        )
        return frames.export(table, Path(path))

    def rounded(self) -> Self:
        """A copy as `save` stores it: statistics of queries, keys and pairs of them with 12 significant bits.

        The relative error is at most 2⁻¹² (0.024 %). Numbers of heads and texts, and arrays of whole numbers such as
        counts, stay exact. ``attrs["significant_bits"]`` is 12. Tables and findings of a saved profile are those of its
        rounded copy; `qkv profile` prints and draws them, too.

        >>> import qkv
        >>> profile = qkv.profile("qkv-mini", "x = 1", progress=False)
        >>> bool(abs(profile.rounded().data["entropy"] / profile.data["entropy"] - 1).max() <= 2**-12)
        True
        """
        groups, residual = (
            {
                name: data.assign({v: x.copy(data=archive.rounded(x.variable)) for v, x in data.data_vars.items()})
                for name, data in part.items()
            }
            for part in (self.groups, self.residual)
        )
        return type(self)(groups, self.attrs | archive.ROUNDED, residual)

    def save(self, path: str | os.PathLike[str], *, exact: bool = False) -> Path:
        """Write the profile atomically to one file (`.qkv.zip`), and return its path.

        Args:
            path: the file; an older one is replaced.
            exact: keep all bits of every number. By default the file has those of `rounded`, in less than half the
                space.
        """
        target = Path(path)
        archive.write_archive(target, {"groups": self.groups, "residual": self.residual}, self.attrs, exact=exact)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a profile written by `save`.

        Raises:
            InputError: if the file is missing, not a profile, truncated, damaged, or written by a newer qkv.
        """
        parts, attrs = archive.read_archive(Path(path))
        with reading(path, "a profile written by Profile.save"):
            profile = cls(parts["groups"], attrs, parts["residual"])
        return profile

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {size_of(data)}" for name, data in self.groups.items())
        return f"Profile({self.attrs.get('model', 'unnamed model')!r}, {sizes})"


def _checked(name: str, data: xr.Dataset) -> xr.Dataset:
    """Validate a group's data set; returns it with tokens as plain strings."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise InputError(f"groups: the name {name!r} is not valid; expected letters, digits, '-' and '_' only")
    where = f"groups[{name!r}]"
    if not isinstance(data, xr.Dataset):
        raise InputError(f"{where}: got {type(data).__name__}; expected an xarray.Dataset")
    variables = data.variables  # indexing the data set itself builds a data array, which takes long
    for kind, all_dims, present in (
        ("variable", {variable: about.dims for variable, about in VARIABLES.items()}, variables),
        ("coordinate", COORDINATES, data.coords),
    ):
        for entry, dims in all_dims.items():
            if entry not in present and (kind == "coordinate" or VARIABLES[entry].always):
                raise InputError(f"{where}: the {kind} {entry!r} is missing; expected it over {dims}")
            if entry in variables and variables[entry].dims != dims:
                raise InputError(f"{where}: {entry!r} has dims {variables[entry].dims}; expected {dims}")
    for attribute in ATTRIBUTES:
        if attribute not in data.attrs:
            raise InputError(f"{where}: the attribute {attribute!r} is missing; expected {ATTRIBUTES}")
    _check_json(f"{where}.attrs", data.attrs)
    for length, dim in (("n_queries", "query"), ("n_keys", "key")):
        lengths = variables[length].values
        if int(lengths.min()) < 1 or int(lengths.max()) > data.sizes[dim]:
            raise InputError(f"{where}: {length!r} must lie between 1 and the {data.sizes[dim]} of {dim!r}")
    strings = {}
    for entry in ("module", "query_token", "key_token"):  # objects: NumPy's fixed-width strings drop trailing NULs
        values = variables[entry].values
        if values.dtype == object and all(type(value) is str for value in values.flat):
            continue
        texts = np.array([str(value) for value in values.ravel()], object)
        strings[entry] = COORDINATES[entry], texts.reshape(values.shape)
    return data.assign_coords(strings) if strings else data.copy()


def _check_json(name: str, value: Any) -> None:
    with refusing(f"{name}: cannot be written as JSON ({{}})", TypeError, ValueError):
        json.dumps(value, allow_nan=False)
