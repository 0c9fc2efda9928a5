"""LaTeX formulas as a line of Unicode text, for a terminal."""

from __future__ import annotations

import re

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
