"""A profile, or the sources of an answer, as one HTML file that needs no network, no server and no installation."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv._files import write_atomically
from qkv.profiler.data.frames import percent
from qkv.profiler.data.tables import readable
from qkv.report.payload import as_json, payload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from qkv.profiler.analyses.sources import Sources
    from qkv.profiler.comparison import Comparison
    from qkv.profiler.data.profile import ProfileData
    from qkv.profiler.surveys.data import Survey

STYLES = ("base.css", "maps.css", "report.css")
IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.MULTILINE)
# Characters that could end a script element, start a comment in it, or break a line of JavaScript.
UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_report(
    profile: ProfileData, path: str | os.PathLike[str], comparison: Comparison | None = None, image: Any = None
) -> Path:
    """Write `profile` as one self-contained HTML page, and return its path.

    It begins with a `comparison`, and with where the model looks in the `image` that it read, if they are given.
    The page holds the numbers of every head as `Profile.heads` returns them (to six digits), curves along the text in
    16 bits (binned for long texts), and dense maps, if stored, in steps of 1/255. Tokens are embedded as data, never as
    markup; a content security policy allows only the script of the page to run.
    """
    target = Path(path)
    write_atomically(target, render(profile, comparison, image).encode("utf-8", "replace"))
    return target


def render(profile: ProfileData, comparison: Comparison | None = None, image: Any = None) -> str:
    """The page as a string."""
    page, blobs = payload(profile)
    title = f"{profile.attrs.get('model', 'Model')} · attention profile"
    kept = "\n".join(f'<script type="text/plain" id="{name}">{blob}</script>' for name, blob in blobs.items())
    parts = [] if comparison is None else [_compared(comparison)]
    parts += [] if image is None else [_looked_at(profile, image)]
    parts.append(_signed(profile))
    return _page("report", STYLES, title, page, pictures="".join(parts), blobs=kept)


def write_sources(found: Sources, path: str | os.PathLike[str]) -> Path:
    """Write the answer beside its passages as one self-contained HTML page, and return its path."""
    target, title = Path(path), f"{found.model} · sources of an answer"
    effects = (
        "The effect of a passage is the rise of the sentence's loss without it: hidden from attention, or left out."
    )
    notes = [found.readers.described(), *([effects] if "hidden" in found.table else [])]
    page = _page("sources", ("base.css", "report.css", "sources.css"), title, found.as_dict() | {"notes": notes})
    write_atomically(target, page.encode("utf-8", "replace"))
    return target


def render_survey(survey: Survey) -> str:
    """What a survey found as a page without a script: findings, figures and the most attended tokens of each group."""
    from qkv.plot.survey import FIGURES

    title = f"{survey.definition['model']} · attention survey"
    body = [f"<header class='page-head'><h1>{html.escape(title)}</h1></header><main>"]
    for group in survey.groups:
        found = survey.findings(group)
        said = [f"{found[0].value} {found[0].label}.", found[0].detail, *map(str, found[1:])]
        named = survey.tokens(12, group).query("token != ''")
        tokens = ", ".join(f"“{readable(row.token)}” {percent(row.share)}" for row in named.itertuples())
        body.append(f"<p class='headline'>{html.escape(said[0])}</p>")
        body += [_picture(draw(survey, group=group), f"{name} of all heads") for name, draw in FIGURES.items()]
        body += [f"<p>{html.escape(one)}</p>" for one in (*said[1:], f"Most attended tokens: {tokens}.")]
    parts = {"title": html.escape(title), "style": "\n".join(asset(one) for one in STYLES)}
    parts["policy"] = f"default-src 'none'; style-src '{_hash(parts['style'])}'; img-src data:"
    head = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("head.html"))
    return head + "\n".join(body) + "</main>\n</body>\n</html>\n"


def _page(name: str, styles: Sequence[str], title: str, page: dict[str, Any], **parts: str) -> str:
    """The page `name`.html with its styles and its script, which alone may run; what it shows is embedded as data."""
    style = "\n".join(asset(one) for one in styles)
    script = bundled(f"{name}.js")
    parts |= {
        "title": html.escape(title),
        "policy": (
            f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data: blob:; "
            "base-uri 'none'; form-action 'none'"
        ),
        "style": style,
        "script": script,
        "page": as_json(page).translate(UNSAFE),
    }
    # A single pass, so that inserted text is not searched for placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("head.html") + asset(f"{name}.html"))


def _section(name: str, title: str, parts: Sequence[str]) -> str:
    heading = f"<h2 id='{name}-title'>{html.escape(title)}</h2>"
    return f"<section id='{name}' aria-labelledby='{name}-title'>{heading}{''.join(parts)}</section>"


def _picture(figure: Figure, said: str) -> str:
    from qkv.plot.layout import png_of

    data = base64.b64encode(png_of(figure)).decode("ascii")
    wide = round(100 * figure.get_figwidth())
    alt = html.escape(said, quote=True)
    return f"<img class='compared' width='{wide}' alt='{alt}' src='data:image/png;base64,{data}'>"


def _signed(profile: ProfileData) -> str:
    """The maps that act in layers whose weights have signs, of the first text of each group; nothing without them."""
    from qkv.plot.of_profile import Plots

    differential, groups = profile.attrs.get("differential", {}), profile.groups
    signed = [group for group in groups if differential.get(group) or "negative" in groups[group]]
    drawn = [figure for group in signed if (figure := Plots(profile).signed(group=group)) is not None]
    if not drawn:
        return ""
    said = (
        "Orange weights add values, blue ones subtract them. Other maps and numbers are of each softmax alone, or of "
        "the absolute weights of linear attention."
    )
    parts = [f"<p>{said}</p>", *(_picture(figure, "The signed maps of all heads") for figure in drawn)]
    return _section("signed", "The maps that act, with their signs", parts)


def _compared(comparison: Comparison) -> str:
    """What changed, group by group: sentences, and pictures of all heads and of the maps that changed most."""
    from qkv.plot.comparison import changed_maps_figure, comparison_figure

    names = (
        f"{p.attrs.get('model', 'model')} ({p.attrs.get('dtype', 'unknown')})" for p in (comparison.a, comparison.b)
    )
    parts = list[str]()
    for group in comparison.groups:
        said = comparison.summary(group)
        parts += [f"<h3>{html.escape(group)} attention</h3>"] if len(comparison.groups) > 1 else []
        parts += [f"<p>{html.escape(' '.join(said))}</p>"]
        drawn = (comparison_figure, changed_maps_figure) if comparison.changed(group) else ()
        found = (draw(comparison, group) for draw in drawn)
        parts += [_picture(figure, said[0]) for figure in found if figure is not None]
    return _section("compared", f"What changed: {' → '.join(names)}", parts)


def _looked_at(profile: ProfileData, image: Any) -> str:
    """Where the model looks in an image: all its tokens, and the last one in all heads and in the most telling one."""
    from qkv.plot.of_profile import Plots

    shares, plots = profile.image_shares(), Plots(profile)
    best = shares.iloc[int(shares["image"].to_numpy().argmax())]
    drawn = {
        "Mean over all tokens and heads": plots.image(image),
        "The last token, mean of all heads": plots.image(image, -1),
        "The last token, in the head with most weight on patches that are no sinks": plots.image(
            image, -1, layer=int(best["layer"]), head=int(best["head"])
        ),
    }
    parts = [f"<h3>{said}</h3>{_picture(figure, said)}" for said, figure in drawn.items()]
    return _section("looked-at", "Where it looks in the image", parts)


def asset(name: str) -> str:
    """The text of a file of the package `qkv.page`."""
    return (files("qkv.page") / name).read_text("utf-8")


def bundled(entry: str) -> str:
    """A JavaScript module and its imports as one script, in dependency order, without import and export statements.

    The modules share one scope, so their top-level names must differ, and they may import and export only by name.
    """
    scripts: dict[str, str] = {}

    def add(name: str) -> None:
        if name in scripts:
            return
        scripts[name] = ""  # a placeholder, since modules may import each other
        source = asset(name)
        for imported in IMPORT.findall(source):
            add(imported)
        del scripts[name]  # inserted again, after its imports
        scripts[name] = re.sub(r"^export ", "", IMPORT.sub("", source), flags=re.MULTILINE)

    add(entry)
    return '"use strict";\n' + "\n".join(scripts.values())


def _hash(content: str) -> str:
    """The hash by which a content security policy allows an inline element."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode("ascii")
