"""Images in a profile: the share of their patches, the names of their sinks, and weights on the grid of an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr

from qkv.errors import InputError
from qkv.profiler.data import tables

if TYPE_CHECKING:
    import pandas as pd

IMAGE, VIEW = 0, 1  # of the places of a patch, before its edges: top, left, bottom, right


def group_of(groups: Mapping[str, xr.Dataset], attrs: Mapping[str, Any], group: str | None) -> str:
    """The kind of attention whose keys are patches."""
    found = [name for name in ([group] if group else groups) if name in groups and "patch" in groups[name]]
    if found:
        return found[0]
    if "unknown" in attrs.get("images", {}):
        raise InputError(f"profile: where the patches of images are is not known: {attrs['images']['unknown']}")
    raise InputError(f"profile: no keys are patches of an image{f' in {group!r}' if group else ''}")


def share_table(data: xr.Dataset, by: str) -> pd.DataFrame:
    """`Profile.image_shares` documents the columns."""
    import pandas as pd

    image, image_sink, sink = (data[name].values for name in ("image", "image_sink", "sink"))
    first_is_patch = np.isfinite(data["patch"].values[:, 0, IMAGE])  # it counts as one, then
    sink = np.where(first_is_patch[:, None, None, None], 0, np.nan_to_num(sink))
    sink = sink + (data["sink_mass"].values if "sink_mass" in data else 0)
    rest = np.clip(1 - image - image_sink - sink, 0, 1)
    columns = {"image": image, "image_sinks": image_sink, "sink": sink, "text": rest}
    if by == "head":
        chosen = np.isfinite(image).all((1, 2))
        means = {name: tables.by_head(x, chosen).ravel() for name, x in columns.items()}
        return tables.heads_of(data).assign(**means)
    text, query = np.nonzero(np.isfinite(image).all((1, 2)))
    tokens = data["query_token"].values
    after = np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values="")
    about = {"input": text, "position": query, "token": tokens[text, query], "chose": after[text, query]}
    return pd.DataFrame(about | {name: x.mean((1, 2))[text, query] for name, x in columns.items()})


def place_words(data: xr.Dataset, text: int, key: int) -> str:
    """Where a key is: "border of the image", "inside the image", "register", "class token" or "text"."""
    name, places = str(data["key_token"].values[text, key]), data["patch"].values[text]
    if np.isnan(places[key, IMAGE]):
        special = {"[CLS]": "class token", "image newline": "end of a row"}
        return special.get(name, "register" if name.startswith("register ") else "text")
    same = places[(places[:, :2] == places[key, :2]).all(1), 2:]
    at_border = (places[key, 2:4] == same[:, :2].min(0)) | (places[key, 4:] == same[:, 2:].max(0))
    of = "thumbnail" if places[key, VIEW] else "image"
    return f"{'border of' if at_border.any() else 'inside'} the {of}"


class Grid(NamedTuple):
    """The patches of one image, or of its thumbnail, as a grid."""

    keys: np.ndarray
    """(down, across): positions of the keys."""
    edges: tuple[float, float, float, float]
    """Top, left, bottom and right edge, as fractions of what the model sees of the image."""


def grid_of(data: xr.Dataset, number: int, *, thumbnail: bool) -> Grid:
    """The grid of an image of the only text of a data set.

    Raises:
        InputError: if there is no such image, or it has no thumbnail.
    """
    places = data["patch"].values[0]
    images = int(np.nanmax(places[:, IMAGE])) + 1
    if not 0 <= number < images:
        raise InputError(f"number is {number}, expected 0 to {images - 1}, an image of this input")
    keys = np.flatnonzero((places[:, IMAGE] == number) & (places[:, VIEW] == thumbnail))
    if not len(keys):
        without = "it is seen as a thumbnail only" if not thumbnail else "the model sees no thumbnail of it"
        raise InputError(f"thumbnail is {thumbnail}, but {without}")
    edges = places[keys, 2:]
    keys = keys[np.lexsort((edges[:, 1], edges[:, 0]))]
    edges = places[keys, 2:].astype(float)
    down = len(np.unique(edges[:, 0]))
    return Grid(keys.reshape(down, -1), (*edges[:, :2].min(0).tolist(), *edges[:, 2:].max(0).tolist()))


def grids(data: xr.Dataset) -> Iterator[tuple[str, Grid]]:
    """The patches of every image of the only text of a data set, and of its thumbnail, with names."""
    places = data["patch"].values[0] if "patch" in data else np.empty((0, 2))
    found = np.unique(places[np.isfinite(places[:, IMAGE]), :2].astype(int), axis=0).tolist()
    for number, thumbnail in found:
        name = f"image {number + 1}" if found[-1][IMAGE] else "the image"
        name = f"thumbnail of {name}" if thumbnail else name
        yield name, grid_of(data, number, thumbnail=bool(thumbnail))


def weights_on(data: xr.Dataset, grid: Grid, query: int | None) -> np.ndarray:
    """Shares of a row on the patches of a grid, (layer, head, down, across); the mean over all rows if it is None.

    That of a patch is over the rows that may attend to it.
    """
    if query is None:
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = data["received"].values[0] / data["visible_queries"].values[0]
        return np.nan_to_num(mean)[..., grid.keys]
    n = int(data["n_queries"][0])
    query = query + n if query < 0 else query
    if not 0 <= query < n:
        raise InputError(f"token is {query}, expected a position from 0 to {n - 1}, or from the end, −1 to {-n}")
    if "weights" in data:
        row = np.nan_to_num(data["weights"].values[0, :, :, query]) / tables.divisors(data)[0, :, :, query, None]
        return row[..., grid.keys]
    if "image_rows" not in data:
        raise InputError("profile: it keeps no weights of tokens of text on patches; profile with a larger map_tokens")
    rows = np.flatnonzero(np.isfinite(data["image"].values[0, 0, 0]))[-data.sizes["image_query"] :]
    if query not in rows:
        raise InputError(
            f"token is {query}, but the profile keeps the weights of {len(rows)} tokens of text on patches, from "
            f"{rows[0]} to {rows[-1]}; profile with a larger map_tokens"
        )
    patches = np.flatnonzero(np.isfinite(data["patch"].values[0, :, IMAGE]))
    found = data["image_rows"].values[0, :, :, int(np.flatnonzero(rows == query)[0])]
    return found[..., np.searchsorted(patches, grid.keys)]
