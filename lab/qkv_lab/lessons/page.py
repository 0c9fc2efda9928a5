"""The cells and the prose of a lesson's page, for the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


SYMBOLS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "varepsilon": "ε", "epsilon": "ε", "theta": "θ",
    "lambda": "λ", "mu": "μ", "sigma": "σ", "tau": "τ", "phi": "φ", "omega": "ω", "ell": "ℓ", "nabla": "∇",
    "sum": "Σ", "prod": "Π", "infty": "∞", "cdot": "·", "times": "×", "approx": "≈", "leq": "≤", "geq": "≥",
    "dots": "…", "ldots": "…", "top": "T", "lfloor": "⌊", "rfloor": "⌋", "in": "∈", "to": "→",
    "qquad": "    ", "quad": "  ",
}  # fmt: skip
"""Unicode for LaTeX commands without arguments. Other names, such as `ln` and `tanh`, stay as they are."""
_ARGUMENT = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"  # braces in braces in braces
_FRACTION = re.compile(r"\\frac\s*" + _ARGUMENT + r"\s*" + _ARGUMENT)
_WRAPPED = re.compile(r"\\(?:text|operatorname|mathbb|mathbf|mathrm)\s*" + _ARGUMENT)
_ROOT = re.compile(r"\\sqrt\s*(?:" + _ARGUMENT + r"|(\w))")
_RAISED = re.compile(r"([\^_])" + _ARGUMENT)
_COMMAND = re.compile(r"\\([A-Za-z]+)")


def plain(formula: str) -> str:
    r"""A formula in LaTeX, without its dollars, as text. Braces become parentheses where they are needed.

    >>> plain(r"a_j = \frac{e^{s_j}}{1 + \sum_i e^{s_i}}")
    'a_j = e^(s_j) / (1 + Σ_i e^(s_i))'
    >>> plain(r"q \cdot k / \sqrt d")
    'q · k / √d'
    """
    text = re.sub(r"\\(?:[bB]ig[lr]?|left|right)(?![a-z])", "", formula.replace("\n", " "))
    text = re.sub(r"\\lVert\s*|\s*\\rVert", "‖", text)
    text = re.sub(r"\\tilde\s*(\w)", "\\1\u0303", text)
    while found := _FRACTION.search(text):
        above, below = (part if " " not in _outside_braces(part) else f"({part})" for part in found.groups())
        slash = "/" if len(above + below) == 2 else " / "
        text = f"{text[: found.start()]}{above}{slash}{below}{text[found.end() :]}"
    text = _WRAPPED.sub(r"\1", text)
    text = _ROOT.sub(lambda found: "√" + _grouped(found[1] or found[2]), text)
    for _ in range(3):
        text = _RAISED.sub(lambda found: found[1] + _grouped(found[2].strip()), text)
    text = re.sub(r"\\[,;!]", " ", text).replace("\\ ", " ").replace("^\\top", "ᵀ")
    text = _COMMAND.sub(lambda found: SYMBOLS.get(found[1], found[1]), text)
    text = text.replace("\\", "").replace("{", "").replace("}", "")
    text = re.sub(r"\^2(?!\w)", "²", text).replace("-", "−")
    return re.sub(r" {2,3}(?! )", " ", text).strip()


def _outside_braces(text: str) -> str:
    while (shorter := re.sub(r"\{[^{}]*\}", "", text)) != text:
        text = shorter
    return text.strip()


def _grouped(text: str) -> str:
    """The text in parentheses, unless it is one number or name."""
    simple = re.fullmatch(r"[^\W_]+|[\d.]+|\\\w+", text.strip())
    return text.strip() if simple else f"({text.strip()})"


_LINK = re.compile(r"(?<!!)\[((?:`[^`]*`|[^\]\[`])*)\]\((?!https?:)[^()\s]*(?:\.md|\.rst|#)[^()\s]*\)")
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_OPTION = re.compile(r":([\w-]+): *(.*)")
_NOT_HERE = "*(On the site of the documentation, something to play with stands here.)*"


@dataclass(frozen=True)
class Cell:
    """A cell of a page: Markdown, or Python with the tags of MyST-NB, such as ``hide-cell`` for a solution."""

    kind: str
    source: str
    tags: tuple[str, ...] = ()


def cells(page: str) -> list[Cell]:
    """The cells of a page, in order. Links between pages become plain text, because the pages are not there.

    >>> [cell.source for cell in cells("See [the terms](terms.md).\\n\\n```{code-cell}\\n1 + 1\\n```")]
    ['See the terms.', '1 + 1']
    """
    found: list[Cell] = []
    text: list[str] = []
    lines = iter(page.splitlines())
    for line in lines:
        if not line.startswith("```"):
            text.append(line)
            continue
        body = _until_fence(lines)
        if line.startswith("```{code-cell}"):
            found += [*_text(text), _code(body)]
            text = []
        elif line.startswith("```{raw}"):
            text.append(_NOT_HERE)
        else:
            text += [line, *body, "```"]
    return found + _text(text)


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Markdown in which everything but code is changed.

    >>> outside_code("a and `a`", str.upper)
    'A AND `a`'
    """
    parts = _CODE.split(markdown)  # every second part is code
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def _until_fence(lines: Iterator[str]) -> list[str]:
    body: list[str] = []
    for line in lines:
        if line.startswith("```"):
            break
        body.append(line)
    return body


def _text(lines: list[str]) -> list[Cell]:
    source = _LINK.sub(r"\1", "\n".join(lines)).strip()
    return [Cell("text", source)] if source else []


def _code(lines: list[str]) -> Cell:
    tags: tuple[str, ...] = ()
    while lines and (option := _OPTION.fullmatch(lines[0])):
        if option[1] == "tags":
            tags = tuple(re.findall(r"[\w-]+", option[2]))
        lines = lines[1:]
    return Cell("code", "\n".join(lines).strip("\n"), tags)


WIDTH = 96  # columns; longer lines are tiring to read
_DISPLAYED = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
_INLINE = re.compile(r"\$([^$]+)\$")
_HEADING = re.compile(r"^(#{1,4}) (.+)$", re.MULTILINE)


def headings(text: str) -> list[str]:
    """The headings in a cell of text, without marks.

    >>> headings("# Scores, and why $\\\\sqrt d$\\n\\nText.")
    ['Scores, and why √d']
    """
    return [readable(found[2]).replace("`", "") for found in _HEADING.finditer(text)]


def readable(markdown: str) -> str:
    """Markdown with its formulas as Unicode text.

    >>> readable("Divide by $\\\\sqrt d$, not by `$d`.")
    'Divide by √d, not by `$d`.'
    """
    return outside_code(markdown, _without_formulas)


def show(console: Console, text: str) -> None:
    """Print a cell of text: headings in bold, paragraphs, lists and tables wrapped to the terminal."""
    from rich.markdown import Markdown
    from rich.padding import Padding

    parts = _HEADING.split(readable(text))
    for mark, heading, body in zip(["", *parts[1::3]], ["", *parts[2::3]], parts[::3], strict=True):
        if heading:
            plain_heading = heading.replace("`", "")
            console.print(f"\n{plain_heading.upper() if mark == '#' else plain_heading}", style="bold", markup=False)
        if body.strip():
            console.print(Padding(Markdown(body.strip()), (0, 0, 1, 0)), width=min(console.width, WIDTH))


def _without_formulas(markdown: str) -> str:
    text = _DISPLAYED.sub(lambda found: f"\n\n> {_escaped(plain(found[1]))}\n\n", markdown)
    return _INLINE.sub(lambda found: _escaped(plain(found[1])), text)


def _escaped(text: str) -> str:
    """Markdown that shows exactly this text."""
    return re.sub(r"([_*\[\]|<>])", r"\\\1", text)
