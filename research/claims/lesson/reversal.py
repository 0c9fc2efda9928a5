"""Checks of the lesson's build-along: the model, its data and its heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure
from torch import Tensor, nn

from research.claims import Verdict, claim, experiment, false, holds, only_when

LENGTH, KINDS, BATCH = 6, 14, 128
VOCABULARY = KINDS + 2
"""Tokens 2 to 15 are symbols, 1 is the separator, 0 is never used."""


class Layer(nn.Module):
    """A pre-norm block with the lesson's initialisation, which also returns its attention weights."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.project = nn.ParameterList(torch.randn(heads, d, d // heads) * 0.02 for _ in range(3))
        self.out = nn.Parameter(torch.randn(heads, d // heads, d) * 0.02)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.ffn = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "n n"]) -> tuple[Tensor, Tensor]:
        y = self.norm1(x)
        q, k, v = (torch.einsum("bne,hed->bhnd", y, w) for w in self.project)
        hidden = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
        weights = (q @ k.mT / q.shape[-1] ** 0.5 + hidden).softmax(-1)
        x = x + torch.einsum("bhnd,hde->bne", weights @ v, self.out)
        return x + self.ffn(self.norm2(x)), weights


class Model(nn.Module):
    """The lesson's model: embeddings, blocks, a norm and a linear map. Masks are True where a query may attend."""

    def __init__(self, vocabulary: int, context: int, d: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, d), nn.Embedding(context, d)
        self.layers = nn.ModuleList(Layer(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary)

    def forward(self, ids: Int[Tensor, "b n"], mask: Bool[Tensor, "n n"]) -> tuple[Tensor, list[Tensor]]:
        x, found = self.tokens(ids) + self.places(torch.arange(ids.shape[1])), []
        for layer in self.layers:
            x, weights = layer(x, mask)
            found.append(weights)
        return self.head(self.norm(x)), found


def sequences(size: int, generator: torch.Generator) -> Int[Tensor, "size 13"]:
    """Random symbols, the separator, and the symbols reversed."""
    drawn = torch.randint(2, VOCABULARY, (size, LENGTH), generator=generator)
    return torch.cat([drawn, torch.ones(size, 1, dtype=torch.long), drawn.flip(1)], 1)


def causal(n: int = 2 * LENGTH) -> Bool[Tensor, "n n"]:
    return torch.ones(n, n, dtype=torch.bool).tril()


STEP = "Step 3: reversal"


def drawn(size: int = 1000) -> torch.Tensor:
    """The lesson's random sequences, (size, 13)."""
    return sequences(size, torch.Generator().manual_seed(0))


@claim(STEP, "The task turns 1 2 3 4 5 into 5 4 3 2 1.")
def c207() -> Verdict:
    symbols = drawn()[:, :LENGTH]
    return only_when(
        symbols.shape[1] == 6 and symbols.min() == 2 and symbols.max() == 15,
        f"As an illustration: in the code there are {symbols.shape[1]} symbols from {symbols.min()} to "
        f"{symbols.max()}, drawn with repetition; 1 is the separator and 0 is reserved.",
    )


@claim(STEP, "A sequence is the input, a separator, and the input reversed: 13 tokens.")
def c208() -> Verdict:
    ids = drawn()
    mirrored = torch.equal(ids[:, :LENGTH].flip(1), ids[:, LENGTH + 1 :])
    return holds(
        mirrored and bool((ids[:, LENGTH] == 1).all()) and ids.shape[1] == 13,
        f"{LENGTH} + 1 + {LENGTH} = {ids.shape[1]}, and position p holds what position 12 − p holds.",
    )


@claim(STEP, "A comment: the model's input is a b c d e f SEP and then six unknown tokens.")
def c209() -> Verdict:
    ids = drawn()
    x = ids[:, :-1]
    shown = torch.equal(x[:, LENGTH + 1 :], ids[:, :LENGTH].flip(1)[:, :-1])
    return false(
        shown and x.shape[1] == 12,
        f"It is {x.shape[1]} tokens: six symbols, the separator, and the first {x.shape[1] - LENGTH - 1} of the "
        "reversed ones, which are the true answers (teacher forcing).",
    )


@claim(STEP, "The loss covers the six reversed tokens only.")
def c210() -> Verdict:
    ids = drawn()
    counted = ids[:, 1:][:, LENGTH:]
    return holds(
        torch.equal(counted, ids[:, :LENGTH].flip(1)),
        f"The target shifted by one, from index {LENGTH} on, is {counted.shape[1]} tokens: the input reversed.",
    )


@claim(STEP, "A comment: in the target the reversed part starts at seq_len + 1.")
def c211() -> Verdict:
    y, answer = drawn()[:, 1:], drawn()[:, :LENGTH].flip(1)
    starts = [s for s in range(y.shape[1] - LENGTH + 1) if torch.equal(y[:, s : s + LENGTH], answer)]
    return false(
        starts == [LENGTH],
        f"At index {LENGTH} = seq_len: the target has been shifted by one already. The code beside the comment slices "
        "there.",
    )


@claim(STEP, "The number printed as Loss is the model's loss.")
def c212() -> Verdict:
    torch.manual_seed(0)
    model, parts = Model(VOCABULARY, 2 * LENGTH + 1), drawn(5000).split(BATCH)
    adam, losses = torch.optim.Adam(model.parameters(), lr=3e-4), list[float]()
    for ids in parts:
        logits = model(ids[:, :-1], causal())[0][:, LENGTH:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, LENGTH + 1 :].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    printed, mean = sum(losses), sum(losses) / len(losses)
    return only_when(
        len(losses) == 40 and abs(mean - math.log(14)) < 0.5 and printed > 35 * mean,
        f"Divided by {len(losses)}: it is the sum over the {len(losses)} batches of an epoch. Chance is not ln 14 = "
        f"{math.log(14):.2f} but {40 * math.log(14):.1f}; the first epoch prints {printed:.0f}, where the mean loss is "
        f"{mean:.2f}.",
    )


@claim(STEP, "The printed reversal accuracy says how well the model reverses.")
def c213() -> Verdict:
    share = 5000 / (VOCABULARY - 2) ** LENGTH
    return experiment(
        "C213",
        "lesson",
        "It is measured on batches of training while the model changes, and the test set is made but never scored. The "
        f"5,000 sequences of training are {share:.2%} of all there are.",
    )


TASK, LOOK, ANALYSIS = "Step 3: reversal", "Step 4: visualise", "Step 5: analysis"
N = 2 * LENGTH
"""Positions that the model reads."""


def lessons_analysis(strongest: torch.Tensor) -> float:
    """The share that step 5 reports, from the strongest key of each of a head's 12 queries."""
    right = 0
    for place in range(LENGTH):
        query, key = LENGTH + 1 + place, LENGTH - 1 - place
        right += query < N and int(strongest[query]) == key
    return right / LENGTH


def panels(layers: int, heads: int) -> Any:
    """The lesson's grid of panels, with its cases for one layer and for one head."""
    grid = Figure().subplots(layers, heads)
    if layers == 1:
        grid = grid.unsqueeze(0) if heads > 1 else [[grid]]
    return grid if heads > 1 else [[row] for row in grid]


@claim(LOOK, "The plotting function works for any number of layers and heads.")
def c216() -> Verdict:
    def works(grid: Callable[[int, int], Any], layers: int, heads: int) -> bool:
        try:
            shown = grid(layers, heads)
            pictures = [shown[i][j].imshow(np.full((2, 2), heads * i + j)) for i in range(layers) for j in range(heads)]
        except AttributeError:
            return False
        return [int(picture.get_array().mean()) for picture in pictures] == list(range(layers * heads))

    def unsqueezed(layers: int, heads: int) -> Any:
        return Figure().subplots(layers, heads, squeeze=False)

    sizes = [(1, 1), (1, 3), (2, 1), (2, 3)]
    found = [[size for size in sizes if works(grid, *size)] for grid in (panels, unsqueezed)]
    return false(
        found == [[(2, 1), (2, 3)], sizes],
        "Of 1 or 2 layers with 1 or 3 heads it draws those of two layers. One layer is an AttributeError: the panels "
        "are a NumPy array, which has no `unsqueeze`. One layer with one head ends in a list where a panel should be. "
        "`subplots(…, squeeze=False)` does all of it.",
    )


@claim(LOOK, "In the figure rows are layers and columns are heads.")
def c217() -> Verdict:
    shape = np.shape(panels(2, 4))
    return holds(shape == (2, 4), f"2 layers × 4 heads make a grid of {shape[0]} × {shape[1]} panels.")


@claim(LOOK, "Position SEP + 1 should attend to position seq_len − 1, SEP + 2 to seq_len − 2, and so on.")
def c218() -> Verdict:
    ids = sequences(500, torch.Generator().manual_seed(0))
    place = torch.arange(LENGTH - 1)
    query, printed = LENGTH + 1 + place, LENGTH - 1 - place
    own = torch.equal(ids[:, printed], ids[:, query])
    mirror = torch.equal(ids[:, N - 1 - query], ids[:, query + 1])
    first = torch.equal(ids[:, LENGTH - 1], ids[:, LENGTH + 1])
    return false(
        own and mirror and first,
        "One query earlier: the separator itself to seq_len − 1, SEP + 1 to seq_len − 2, so that query + key is "
        f"2 · seq_len − 1 = {N - 1}. There stands the symbol to be said next; the printed pairs point at the symbol "
        "that the query already is.",
    )


@claim(LOOK, "The pattern is an anti-diagonal.")
def c219() -> Verdict:
    ids, query = sequences(500, torch.Generator().manual_seed(0)), np.arange(LENGTH, N)
    key = [[k for k in range(LENGTH) if torch.equal(ids[:, k], ids[:, q + 1])] for q in query]  # what is said next
    slope, offset = np.polyfit(query, np.array(key)[:, 0], 1)
    return holds(
        all(len(found) == 1 for found in key) and abs(slope + 1) < 1e-9,
        f"Key = {offset:.0f} − query, a line of slope {slope:.0f} (by the printed pairs it is 12 − query: next to it).",
    )


@claim(ANALYSIS, "The analysis reports the share of queries at which a head attends to the right position.")
def c222() -> Verdict:
    perfect = torch.tensor([0] * LENGTH + [N - 1 - q for q in range(LENGTH, N)])
    printed = torch.tensor([0] * LENGTH + [min(N - q, LENGTH) for q in range(LENGTH, N)])
    return false(
        lessons_analysis(perfect) == 0 and abs(lessons_analysis(printed) - 5 / 6) < 1e-9,
        f"A head that reverses perfectly gets {lessons_analysis(perfect):.1%}, for the analysis looks one key too far "
        f"to the right, and a head that does what it asks for {lessons_analysis(printed):.1%}: it counts 5 queries and "
        "divides by 6. Right is: query seq_len + p, key seq_len − 1 − p, for p from 0 to 5.",
    )
