"""The pictures of courses: a matrix of weights, a model of Hugging Face by its name, and the heads of a reversal."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import qkv
from qkv_lab.course_masks import create_causal_mask

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_attention(attention_weights: Tensor, title: str = "Attention Weights") -> None:
    """Show one matrix of weights (n, n) with its numbers."""
    names = [f"Pos {i}" for i in range(attention_weights.shape[0])]
    _show(qkv.plot.weights(attention_weights, names, values=True, title=title).figure)  # type: ignore[arg-type]


def visualize_attention(*args: Any, **options: Any) -> Any:
    """The three functions of this name, told apart by their first argument.

    * ``visualize_attention(model_name, text)``: layer means of a Hugging Face model; returns ``(attentions, tokens)``.
    * ``visualize_attention(model, data, sample_idx=0, device="cpu")``: every head of a `TinyTransformer` on one row of
      `generate_reversal_data`; returns the weights of all layers.
    * ``visualize_attention(tokens, attention_weights, head=0)``: one head; returns the figure.
    """
    first = args[0] if args else next((options[x] for x in ("model", "tokens", "model_name") if x in options), "gpt2")
    if isinstance(first, nn.Module):
        return _of_reversal(*args, **options)
    return _of_name(*args, **options) if isinstance(first, str) else _of_tokens(*args, **options)


def _of_name(
    model_name: str = "gpt2", text: str = "The quick brown fox jumps over the lazy dog."
) -> tuple[tuple[Tensor, ...], list[str]]:
    profile = qkv.profile(model_name, text, probe=False, map_tokens=2**20)
    attentions = tuple(torch.from_numpy(layer)[None] for layer in profile.data["weights"].values[0])
    tokens = [str(token) for token in profile.data["key_token"].values[0]]
    means = {f"Layer {i}": layer[0].mean(0) for i, layer in enumerate(attentions)}
    _show(qkv.plot.panels(means, tokens, what="weight, mean of heads"), saved=True)
    return attentions, tokens


def _of_reversal(model: nn.Module, data: Tensor, sample_idx: int = 0, device: str = "cpu") -> list[Tensor]:
    model.eval()
    x = data[sample_idx : sample_idx + 1, :-1].to(device)
    with torch.no_grad():
        weights: list[Tensor] = model(x, mask=create_causal_mask(x.shape[1], device))[1]
    tokens = ["SEP" if i == 1 else str(i) for i in x[0].tolist()]
    names = {f"Layer {i + 1}, Head {h + 1}": m for i, layer in enumerate(weights) for h, m in enumerate(layer[0])}
    _show(qkv.plot.panels(names, tokens, vmax=1, columns=weights[0].shape[1], what="weight"), saved=True)
    return weights


def _of_tokens(tokens: list[str], attention_weights: Tensor, head: int = 0) -> Figure:
    title = f"Attention Head {head + 1}"
    axes = qkv.plot.weights(attention_weights, tokens, item=0, head=head, vmax=1, values=True, title=title)
    figure: Figure = axes.figure  # type: ignore[assignment]
    _show(figure)
    return figure


def _show(figure: Figure, *, saved: bool = False) -> None:
    """Show a figure in a notebook or in a window; with `saved`, write it as attention_visualization.png, too."""
    import matplotlib.pyplot as plt

    if saved:
        figure.savefig("attention_visualization.png", dpi=150)
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        sys.modules["IPython"].display.display(figure)
    elif plt.get_backend().lower() != "agg":  # which has no window
        file = io.BytesIO()
        figure.savefig(file, dpi=100)
        window = plt.figure(figsize=figure.get_size_inches(), dpi=100)  # pyplot does not manage the figure itself
        file.seek(0)
        window.figimage(plt.imread(file))
        plt.show()
