"""What there is to look at: models on their texts and saved profiles, each made ready in the background."""

from __future__ import annotations

import base64
import copy
import functools
import json
import logging
import secrets
import threading
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from qkv.errors import InputError
from qkv.profiler import run
from qkv.profiler.analyses import edits
from qkv.profiler.capture import models
from qkv.profiler.capture.inputs import batches
from qkv.profiler.capture.residual import attention_modules
from qkv.profiler.explore import explorer as explore
from qkv.profiler.explore.tile_cache import Cancelled, Stopped
from qkv.report.payload import payload
from qkv.server.align import Aligners
from qkv.server.live import Live
from qkv.server.stored import Stored

if TYPE_CHECKING:
    from qkv.profiler.capture.models import Loaded
    from qkv.profiler.profiles import Profile

M = TypeVar("M", bound=nn.Module)
Maker = Callable[["Source"], None]

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Source:
    """Something to look at. What a page needs is there once its state is "ready"."""

    id: int
    name: str
    kind: Literal["model", "profile", "remedy"]
    state: Literal["running", "ready", "failed"] = "running"
    done: int = 0
    total: int = 1
    what: str = "waiting"
    error: str | None = None
    profile: Profile | None = None
    maps: dict[str, explore.Explorer | Stored] = field(default_factory=dict)
    """What answers for the weights of each group."""
    page: bytes = b""
    """`qkv.report.payload.payload`'s JSON."""
    curves: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Its 16-bit planes by group and text."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Its groups."""


class Session:
    """The sources, in the order they were added. `start` makes them ready, one after another, in a thread.

    >>> from qkv.profiler.capture.models import load
    >>> session = Session("qkv-mini")
    >>> source = session.add_model(load("qkv-mini"), "def one():\\n    return 1")
    >>> session.prepare()
    >>> source.state, len(source.groups[0]["texts"][0]["keys"])
    ('ready', 7)
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.version = secrets.token_urlsafe(9)
        self.sources: list[Source] = []
        self.live: Live | None = None
        self.live_described: dict[str, Any] | None = None
        self.aligners = Aligners()
        self.aligners_described: dict[str, Any] = {"models": [], "captioner": None}
        self._asked: dict[int, tuple[Loaded, Any, str | None]] = {}  # twins of models that never run; what they read
        self._room = explore.CacheBudget()
        self._cores = torch.get_num_threads()
        self._remedies: dict[tuple[int, str], Source] = {}
        self._makers: list[tuple[Source, Maker]] = []
        self._has_small_models = False
        self._changed = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add_profile(self, profile: Profile, name: str = "") -> Source:
        """A profile that is there already: numbers as saved, maps as far as it keeps them."""

        def make(source: Source) -> None:
            source.profile, source.maps = profile, dict.fromkeys(profile.groups, Stored(profile))

        return self._add(name or str(profile.attrs.get("model", "profile")), "profile", make)

    def add_model(self, loaded: Loaded, inputs: Any, *, target: str | None = None, name: str = "") -> Source:
        """A model on its texts: `inputs` and `target` as in `qkv.profile`."""

        def make(source: Source) -> None:
            _profiled(source, loaded, inputs, target, self._room, self._closed.is_set)

        # Made now: once the model runs, a copy of it would have the hooks of that moment.
        apart = replace(loaded, model=twin(loaded.model))
        source = self._add(name or loaded.name, "model", make)
        self._asked[source.id] = apart, inputs, target
        return source

    def add_remedy(self, of: int, normalizer: str) -> Source:
        """The same model on the same texts with another normalizer in all heads, not trained for it.

        Asked for again, it is the one that is there; one that failed is tried again.

        Raises:
            InputError: for a source that is no model, or a model whose heads cannot be edited.
        """
        if of not in self._asked:
            raise InputError(f"source is {of}, expected a model that this server has loaded: a profile cannot run")
        loaded, inputs, target = self._asked[of]
        changes = edits.everywhere(loaded.model, normalizer)
        there = self._remedies.get((of, normalizer))
        if there is not None and there.state != "failed":
            return there
        name = f"{loaded.name} with {normalizer}"

        def make(source: Source) -> None:
            edited = replace(loaded, name=name, model=twin(loaded.model))
            _always(edited.model, changes)
            _profiled(source, edited, inputs, target, self._room, self._closed.is_set)

        if there is None:
            there = self._remedies[of, normalizer] = self._add(name, "remedy", make)
        else:
            with self._changed:
                there.state, there.done, there.what, there.error = "running", 0, "waiting", None
                self._makers.append((there, make))
        self.start()
        return there

    def start(self) -> None:
        """Make ready, in a thread, what is not."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._prepare_in_thread, name="qkv prepare", daemon=True)
                self._thread.start()

    def close(self, wait: float = 2) -> bool:
        """Give up what is being made ready. Whether that has ended, after so many seconds at most."""
        self._closed.set()
        thread = self._thread
        if thread is None:
            return True
        thread.join(wait)
        return not thread.is_alive()

    def prepare(self) -> None:
        """Make ready what is not; returns when all is."""
        if not self._has_small_models:
            self._has_small_models = True
            self._small_models()
        while (following := self._following()) is not None:
            source, make = following
            try:
                make(source)
                _paged(source)
                source.state, source.what, source.done = "ready", "ready", source.total
            except Cancelled:
                source.error, source.state = "the server was ended", "failed"
            except InputError as error:
                source.error, source.state = f"{error}", "failed"
                log.error("%s: %s", source.name, error)
            except Exception as error:
                source.error = f"{source.name} could not be profiled ({type(error).__name__}): the terminal says more."
                source.state = "failed"
                log.exception("%s could not be profiled", source.name)

    def _small_models(self) -> None:
        """What answers to text typed, the first model given that can, and models that align. Quick, so before all."""
        try:
            given = (Live(replace(loaded, model=twin(loaded.model))) for loaded, _, _ in self._asked.values())
            live = next((x for x in given if x.described() is not None), None) or Live(models.load("qkv-mini"))
            self.live, self.live_described = live, live.described()
            self.aligners_described = self.aligners.described()
        except Exception:  # without them the rest works
            log.exception("Models for text typed and for alignment could not be loaded")

    def _add(self, name: str, kind: Literal["model", "profile", "remedy"], make: Maker) -> Source:
        with self._changed:
            source = Source(len(self.sources), name, kind)
            self.sources.append(source)
            self._makers.append((source, make))
        return source

    def _following(self) -> tuple[Source, Maker] | None:
        with self._changed:
            return self._makers.pop(0) if self._makers else None

    def _prepare_in_thread(self) -> None:
        torch.set_num_threads(self._cores)  # see `qkv.server.jobs.Jobs`
        while True:
            self.prepare()
            with self._changed:
                if not self._makers:
                    self._thread = None
                    return


def twin(model: M) -> M:
    """A model of the same parameters and buffers, not copies of them, in modules of its own.

    Hooks and settings of one do not concern the other: two threads may run them at once.

    >>> model = nn.Linear(2, 2)
    >>> twin(model).weight is model.weight, twin(model) is model
    (True, False)
    """
    shared: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _always(model: nn.Module, changes: list[edits.Edit]) -> None:
    """Every forward of the model is edited so, also those that maps of long texts need later."""
    plain = model.forward

    @functools.wraps(plain)
    def forward(*arguments: Any, **options: Any) -> Any:
        with edits.edited(model, changes):
            return plain(*arguments, **options)

    model.forward = forward


def _profiled(
    source: Source, loaded: Loaded, inputs: Any, target: str | None, room: explore.CacheBudget, stopped: Stopped
) -> None:
    """The profile, and the maps of all heads."""
    model, tokenizer, name = loaded.model, loaded.tokenizer, loaded.name

    def step(*_: object) -> None:
        if stopped():
            raise Cancelled
        source.done = min(source.done + 1, source.total - 1)  # short texts that probe the model come after its own

    names = set(attention_modules(model))
    layers = [module for at, module in model.named_modules() if at in names]
    source.total = len(layers) * len(list(batches(model, inputs, tokenizer, target))) + 1
    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(step).remove)
        source.what = "profiling"
        profile = source.profile = run.profile(
            model, inputs, tokenizer=tokenizer, target=target, partial=True, progress=False, name=name
        )
        source.what = "making the maps ready"
        explorer = explore.of(model, inputs, tokenizer=tokenizer, target=target, name=name, room=room)
        source.maps = _maps(profile, explorer, stopped)


def _maps(profile: Profile, explorer: explore.Explorer, stopped: Stopped) -> dict[str, explore.Explorer | Stored]:
    """Of each group exact ones where its calls can be seen; of what was read off a model's outputs, what was kept."""
    found: dict[str, explore.Explorer | Stored] = {}
    for group, data in profile.groups.items():
        try:
            for text in range(data.sizes["text"]):
                explorer.info(group, text, stopped=stopped)  # the model runs now, not while somebody waits
        except InputError as error:
            found[group] = Stored(profile, f"{error}.")
        else:
            found[group] = explorer
    return found


def _paged(source: Source) -> None:
    """What the page is made of, ready to send."""
    assert source.profile is not None
    source.what = "writing the page"
    page, blobs = payload(source.profile)
    source.groups = page["groups"]
    source.page = json.dumps(page, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "replace"
    )
    source.curves = {
        (group, text): zlib.decompress(base64.b64decode(blobs[f"curves-{group}-{text}"]))
        for group, one in enumerate(page["groups"])
        for text in range(len(one["texts"]))
    }
