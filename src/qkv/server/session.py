"""The session of a server: models on their texts and saved profiles, prepared one after another in the background."""

from __future__ import annotations

import base64
import copy
import functools
import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import entry_points
from io import BytesIO
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from qkv.errors import InputError
from qkv.models import loading
from qkv.profiler.capture.inputs import batches
from qkv.profiler.capture.patches import window
from qkv.profiler.capture.residual import attention_modules
from qkv.profiler.comparison import effect_of
from qkv.profiler.data import images
from qkv.profiler.explore import explorer as explore
from qkv.profiler.explore.pyramid import Cancelled, Stopped
from qkv.report.payload import as_json, payload
from qkv.report.stored import StoredMaps
from qkv.runs import run
from qkv.server.live import Live, everywhere
from qkv.server.schemas import AddedPage, SourceState

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from fastapi import APIRouter

    from qkv.models.loading import Loaded
    from qkv.runs.profiles import Profile

M = TypeVar("M", bound=nn.Module)
Prepare = Callable[["Source"], None]

log = logging.getLogger(__name__)

PICTURE = 480  # largest side of an image on a page, in pixels


@dataclass(eq=False)
class ViewerPage(AddedPage):
    """A page that a package adds to the viewer, as an object in its group of entry points ``qkv.pages``."""

    folder: Traversable
    """Static files, which are served beside the viewer's own."""
    router: APIRouter
    """Routes below ``/api``."""
    prepare: Callable[[], dict[str, Any]]
    """Makes what the page shows at first: its `data`."""


def added_pages() -> list[ViewerPage]:
    """The pages that installed packages add. One that cannot be loaded is left out, and the log says why."""
    pages = []
    for entry in entry_points(group="qkv.pages"):
        try:
            page = entry.load()
            if not (isinstance(page, ViewerPage) and page.folder.is_dir()):
                raise TypeError(f"it is {page!r}, expected a ViewerPage whose folder exists")
        except Exception as error:  # importing a module can raise anything
            log.warning("The page %s of %s cannot be loaded: %r", entry.name, entry.value, error)
            continue
        pages.append(replace(page, missing=f"{page.title} is being prepared."))
    return pages


@dataclass(eq=False)
class Source(SourceState):
    """A profile or model of the session. Its data is complete once its state is "ready"."""

    profile: Profile | None = None
    maps: dict[str, explore.Explorer | StoredMaps] = field(default_factory=dict)
    """The attention weights of each group."""
    page: bytes = b""
    """The JSON of `qkv.report.payload.payload`."""
    blobs: dict[str, str] = field(default_factory=dict)
    """The curves and the pooled maps of each text by their names in the payload."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The groups of the page."""
    arguments: dict[str, Any] | None = None
    """The model and text as options of the command line, from which findings write their next commands."""
    image: Any = None
    """The RGB image of Pillow that it reads, if it is known."""
    effects: dict[str, str] = field(default_factory=dict)
    """Of an intervention: for each group, whether it removed the sinks of the model, and why."""


class Session:
    """The sources in the order they were added. `start` prepares them in a thread, one after another.

    >>> from qkv.models.loading import load_model
    >>> session = Session("qkv-mini")
    >>> source = session.add_model(load_model("qkv-mini"), "def one():\\n    return 1")
    >>> session.prepare()
    >>> source.state, len(source.groups[0]["texts"][0]["keys"])
    ('ready', 7)
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.version = secrets.token_urlsafe(9)
        self.sources: list[Source] = []
        self.live: Live | None = None
        self.pages = added_pages()
        self._models: dict[int, tuple[Loaded, Any, str | None]] = {}  # pristine copies with their inputs and target
        self._cache_budget = explore.CacheBudget()
        self._interventions: dict[tuple[int, str], Source] = {}
        self._pending: SimpleQueue[tuple[Source, Prepare] | None] = SimpleQueue()  # None at the end
        self._has_small_models = False
        self._closed = threading.Event()
        cores = torch.get_num_threads()  # see `qkv.server.jobs.JobQueue`
        self._thread = threading.Thread(target=self._prepare_in_thread, args=(cores,), name="qkv prepare", daemon=True)

    def add_profile(self, profile: Profile, name: str = "", *, image: Any = None) -> Source:
        """Add a saved profile, with the RGB image of Pillow that it read, if any.

        Its maps are available as far as the profile stores them.
        """

        def prepare(source: Source) -> None:
            source.profile, source.maps = profile, dict.fromkeys(profile.groups, StoredMaps(profile))

        source = self._add(name or str(profile.attrs.get("model", "profile")), "profile", prepare)
        source.image = image
        return source

    def add_model(
        self,
        loaded: Loaded,
        inputs: Any,
        *,
        target: str | None = None,
        name: str = "",
        arguments: dict[str, Any] | None = None,
        image: Any = None,
    ) -> Source:
        """Add a model on its texts, to be profiled; `inputs` and `target` as in `qkv.profile`.

        `arguments` are those of the command, see `qkv.cli.shared.Input.arguments`; `image` as in `add_profile`.
        """

        def prepare(source: Source) -> None:
            _profile_model(source, loaded, inputs, target, self._cache_budget, self._closed.is_set)

        # Copy it now: once the model runs, a copy would inherit the hooks that are registered at that moment.
        pristine = replace(loaded, model=copy_sharing_weights(loaded.model))
        source = self._add(name or loaded.name, "model", prepare)
        source.arguments, source.image = arguments, image
        self._models[source.id] = pristine, inputs, target
        return source

    def add_intervention(self, of: int, normalizer: str) -> Source:
        """Add the model of a source, on the same texts, with another normalizer in all heads and without retraining.

        The same intervention again returns the existing source; one that failed is prepared again.
        """
        if of not in self._models:
            raise InputError(f"source is {of}, expected a model that this server has loaded: a profile cannot run")
        loaded, inputs, target = self._models[of]
        everywhere(loaded.model, normalizer)  # raises for a model whose heads cannot be edited
        existing = self._interventions.get((of, normalizer))
        if existing is not None and existing.state != "failed":
            return existing
        name = f"{loaded.name} with {normalizer}"

        def prepare(source: Source) -> None:
            edited = replace(loaded, name=name, model=copy_sharing_weights(loaded.model))
            _edit_every_forward(edited.model, everywhere(edited.model, normalizer))
            _profile_model(source, edited, inputs, target, self._cache_budget, self._closed.is_set)
            before = next(one.profile for one in self.sources if one.id == of)
            if before is not None and source.profile is not None:
                pairs = {group: (before.groups[group], data) for group, data in source.profile.groups.items()}
                source.effects = {group: effect_of(normalizer, *pair) for group, pair in pairs.items()}

        if existing is None:
            existing = self._interventions[of, normalizer] = self._add(name, "intervention", prepare)
            existing.image = self.sources[of].image
        else:
            existing.state, existing.done, existing.stage, existing.error = "running", 0, "waiting", None
            self._pending.put((existing, prepare))
        self.start()
        return existing

    def start(self) -> None:
        """Prepare the sources, and those that are added later, in a thread."""
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """Tell the preparation to stop after the layer that it measures."""
        self._closed.set()
        self._pending.put(None)

    def close(self, wait: float = 2) -> bool:
        """As `stop`; returns whether the thread has ended, after at most `wait` seconds."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(wait)
        return not self._thread.is_alive()

    def prepare(self, *, forever: bool = False) -> None:
        """Prepare all pending sources in this thread, or all that are added until `stop`."""
        if not self._has_small_models:
            self._has_small_models = True
            self._load_small_models()
        with suppress(Empty):
            while (following := self._pending.get(block=forever)) is not None:
                self._prepare_source(*following)

    def _prepare_in_thread(self, cores: int) -> None:
        torch.set_num_threads(cores)
        self.prepare(forever=True)

    def _prepare_source(self, source: Source, prepare: Prepare) -> None:
        try:
            prepare(source)
            _build_page(source)
            source.state, source.stage, source.done = "ready", "ready", source.total
        except Cancelled:
            source.error, source.state = "the server was stopped", "failed"
        except InputError as error:
            source.error, source.state = f"{error}", "failed"
            log.error("%s: %s", source.name, error)
        except Exception as error:
            source.error = f"{source.name} could not be profiled ({type(error).__name__}): the terminal shows why."
            source.state = "failed"
            log.exception("%s could not be profiled", source.name)

    def _load_small_models(self) -> None:
        """Load the live model (the first model that supports live text, else qkv-mini), and prepare the added pages.

        This is quick, so it comes before the sources.
        """
        try:
            candidates = (
                Live(replace(loaded, model=copy_sharing_weights(loaded.model)), inputs)
                for loaded, inputs, _ in self._models.values()
            )
            supported = (live for live in candidates if live.description is not None)
            self.live = next(supported, None) or Live(loading.load_model("qkv-mini"))
        except Exception:  # the other pages work without it
            log.exception("The model for live text could not be loaded")
        for page in self.pages:
            try:
                page.data, page.missing = page.prepare(), None
            except Exception as error:  # another package's code can raise anything
                page.missing = f"{page.title} could not be prepared ({type(error).__name__})."
                log.exception("The page %s could not be prepared", page.title)

    def _add(self, name: str, kind: Literal["model", "profile", "intervention"], prepare: Prepare) -> Source:
        source = Source(len(self.sources), name, kind)
        self.sources.append(source)
        self._pending.put((source, prepare))
        return source


def copy_sharing_weights(model: M) -> M:
    """A copy of a model whose modules are new, but whose parameters and buffers are the same tensors.

    Hooks and settings of the copy do not affect the model, so two threads may run both at once.

    >>> model = nn.Linear(2, 2)
    >>> copy_sharing_weights(model).weight is model.weight, copy_sharing_weights(model) is model
    (True, False)
    """
    shared: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _edit_every_forward(model: nn.Module, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Apply the edits in every forward pass of the model, including those that compute maps of long texts later."""
    plain = model.forward

    @functools.wraps(plain)
    def forward(*arguments: Any, **options: Any) -> Any:
        with context():
            return plain(*arguments, **options)

    model.forward = forward


def _profile_model(
    source: Source, loaded: Loaded, inputs: Any, target: str | None, budget: explore.CacheBudget, stopped: Stopped
) -> None:
    """Profile a model on its inputs, and prepare the maps of all heads."""
    model, tokenizer, name = loaded.model, loaded.tokenizer, loaded.name

    def step(*_: object) -> None:
        if stopped():
            raise Cancelled
        source.done = min(source.done + 1, source.total - 1)  # the probe texts after the inputs are not counted

    names = set(attention_modules(model))
    layers = [module for at, module in model.named_modules() if at in names]
    source.total = len(layers) * len(list(batches(model, inputs, tokenizer, target))) + 1
    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(step).remove)
        source.stage = "profiling"
        profile = source.profile = run.profile(
            model, inputs, tokenizer=tokenizer, target=target, partial=True, progress=False
        )
        profile.attrs["model"] = name
        if source.arguments is not None:
            profile.attrs["arguments"] = source.arguments
        source.stage = "preparing the maps"
        explorer = explore.of(model, inputs, tokenizer=tokenizer, target=target, name=name, caches=budget)
        source.maps = _maps(profile, explorer, stopped)


def _maps(profile: Profile, explorer: explore.Explorer, stopped: Stopped) -> dict[str, explore.Explorer | StoredMaps]:
    """The maps of each group: exact if qkv can record its inputs, else those that the profile stores.

    The profile has nothing else for weights that were read from the outputs of a model.
    """
    found: dict[str, explore.Explorer | StoredMaps] = {}
    for group, data in profile.groups.items():
        try:
            for text in range(data.sizes["text"]):
                explorer.info(group, text, stopped=stopped)  # run the model now rather than on the first request
        except InputError as error:
            found[group] = StoredMaps(profile, f"{error}.")
        else:
            found[group] = explorer
    return found


def _seen(source: Source, group: str, grid: images.Grid) -> str | None:
    """What a grid of patches covers of the image of a source, as the address of a picture; None if it is not known."""
    seen = source.profile.attrs["images"][group] if source.profile is not None else None
    if source.image is None or seen is None:
        return None
    top, left, tall, wide = window(seen, source.image.height, source.image.width)
    edges = zip((left, top, left, top), (wide, tall, wide, tall), (grid.edges[at] for at in (1, 0, 3, 2)), strict=True)
    part, file = source.image.crop([round(first + side * edge) for first, side, edge in edges]), BytesIO()
    part.thumbnail((PICTURE, PICTURE))
    part.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _build_page(source: Source) -> None:
    """Encode the page and the curves of a source for sending, with the size and resolution of the maps of each text."""
    assert source.profile is not None
    source.stage = "writing the page"
    page, source.blobs = payload(source.profile, weights=False)  # it has exact tiles
    page["effects"] = source.effects
    for group in page["groups"]:
        for text, view in enumerate(group["texts"]):
            view["map"] = asdict(source.maps[group["name"]].info(group["name"], text))
            one = source.profile.one_text(text, group["name"])
            view["patches"] = [
                {"name": name, "keys": grid.keys.tolist(), "picture": _seen(source, group["name"], grid)}
                for name, grid in images.grids(one)
            ]
    source.groups = page["groups"]
    source.page = as_json(page).encode()
