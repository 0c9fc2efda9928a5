"""Image captioning with soft or hard attention to a grid of image features (Xu et al. 2015)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.choice import choose_keys
from qkv.errors import InputError, at_least_one, one_of
from qkv.kernels import serving
from qkv.models.config import check_dropout, check_ids, check_tokens
from qkv.nn.alignment import AdditiveAttention
from qkv.scores import Additive

BASELINE_DECAY = 0.9
"""Weight of the old baseline in its moving average (§4.1)."""


@dataclass(frozen=True)
class CaptionerConfig:
    """Sizes of a `Captioner`.

    >>> CaptionerConfig(100, attention="hard").convolutions
    3
    """

    vocab_size: int
    channels: int = 1
    """Colour channels of the images: 1 or 3."""
    d_features: int = 64
    """Size of the annotation vector of each cell of the grid."""
    convolutions: int = 3
    """2 or 3, each with stride 2: a cell of the grid is 4 or 8 pixels wide."""
    d_embedding: int = 64
    d_hidden: int = 128
    d_attention: int = 64
    """Dimension in which the additive score compares state and annotations."""
    attention: Literal["soft", "hard"] = "soft"
    gate: bool = True
    """Whether the context is multiplied by a gate β, computed from the state (§4.2.1)."""
    penalty: float = 1.0
    """λ of eq. 14, for soft attention: the penalty for attending to some cells more than to others."""
    entropy: float = 0.002
    """λ of the entropy term in eq. 11, for hard attention."""
    dropout: float = 0.0
    """Dropout before the output matrix."""
    pad: int = 0
    start: int = 1
    end: int = 2

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_tokens(name, self.vocab_size, pad=self.pad, start=self.start, end=self.end)
        at_least_one(name, **{x: getattr(self, x) for x in ("d_features", "d_embedding", "d_hidden", "d_attention")})
        if self.channels not in (1, 3):
            raise InputError(f"{name}: channels is {self.channels}, expected 1 or 3")
        if self.convolutions not in (2, 3):
            raise InputError(f"{name}: convolutions is {self.convolutions}, expected 2 or 3")
        one_of(f"{name}: attention", self.attention, ("soft", "hard"))
        if min(self.penalty, self.entropy) < 0:
            raise InputError(f"{name}: penalty is {self.penalty} and entropy {self.entropy}, expected at least 0")
        check_dropout(name, self.dropout)


@dataclass(eq=False)
class CaptionerState:
    """Annotations of an image, and the state of the decoder."""

    annotations: Float[Tensor, "b cells d"]
    projected: Float[Tensor, "b cells a"]
    """Projections of the annotations for the additive score, computed once."""
    hidden: Float[Tensor, "b dh"]
    cell: Float[Tensor, "b dh"]

    def reorder(self, rows: Int[Tensor, " b2"]) -> None:
        """Select batch items in this order, in place."""
        self.annotations, self.projected = self.annotations[rows], self.projected[rows]
        self.hidden, self.cell = self.hidden[rows], self.cell[rows]


class Run(NamedTuple):
    """Results of teacher forcing at each token."""

    logits: Float[Tensor, "b t vocabulary"]
    weights: Float[Tensor, "b t cells"]
    """The attention weights α; with hard attention, the distribution that the cell is drawn from."""
    log_prob: Float[Tensor, "b t"]
    """Natural logarithm of the weight of the chosen cell; 0 with soft attention."""


class Captioner(nn.Module):
    """Show, Attend and Tell (Xu et al. 2015, arXiv:1502.03044), with a small convolutional network in place of VGG.

    The convolutions (3 × 3, stride 2, each followed by a ReLU) compute a grid of annotation vectors; the LSTM's initial
    state is computed from their mean (§3.1.2). At each step the previous state is the query of additive attention, and
    the LSTM reads the last token and the context vector:

    - ``"soft"``: the weighted mean of the annotations (eq. 13);
    - ``"hard"``: one annotation: in training mode drawn with the weights as probabilities (eq. 9), otherwise the one
      with the largest weight.

    The output is L_o (E y + L_h h + L_z z) (eq. 7), without biases. Embeddings are initialised from a normal
    distribution with standard deviation 0.1, the rest as torch's modules and `AdditiveAttention` do. Captions are
    padded at their ends with ``config.pad``.

    The paper also replaces the drawn annotation by the mean with probability one half. This is left out, because the
    gradient would no longer belong to a single objective.

    Shapes: b images, t tokens of a caption, cells = gh · gw of the grid.

    >>> model = Captioner(CaptionerConfig(10))
    >>> model(torch.randn(2, 1, 32, 24), torch.tensor([[1, 4, 5], [1, 7, 2]])).shape
    torch.Size([2, 3, 10])
    >>> model.maps(torch.randn(2, 1, 32, 24), torch.tensor([[1, 4, 5], [1, 7, 2]])).shape
    torch.Size([2, 3, 4, 3])
    """

    baseline: Tensor
    """The baseline b of eq. 11: a moving average of ln p(caption | cells, image)."""

    def __init__(self, config: CaptionerConfig) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = config.vocab_size
        d, dh, e = config.d_features, config.d_hidden, config.d_embedding
        layers: list[nn.Module] = []
        for i in range(config.convolutions):
            layers += [nn.Conv2d(d if i else config.channels, d, 3, stride=2, padding=1), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.first_hidden, self.first_cell = nn.Linear(d, dh), nn.Linear(d, dh)
        self.embedding = nn.Embedding(config.vocab_size, e)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.attention = AdditiveAttention(dh, d, config.d_attention)
        self.gate = nn.Linear(dh, 1) if config.gate else None
        self.lstm = nn.LSTMCell(e + d, dh)
        self.from_hidden, self.from_seen = nn.Linear(dh, e, bias=False), nn.Linear(d, e, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(e, config.vocab_size, bias=False)
        self.register_buffer("baseline", torch.zeros(()))

    def forward(
        self, images: Float[Tensor, "b channels height width"], captions: Int[Tensor, "b t"]
    ) -> Float[Tensor, "b t vocabulary"]:
        """Logits of the next token at each position of the captions (teacher forcing)."""
        return self._run(images, captions).logits

    def loss(self, images: Float[Tensor, "b channels height width"], captions: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
        """The training objective, in nats per predicted token: every token after the first; padding is ignored.

        Soft: the cross-entropy and λ Σ_cells (1 − Σ_t α)² (eq. 14), summed over all images and divided by the number of
        predicted tokens.

        Hard: in training mode, a surrogate whose *gradient*, averaged over draws, is that of the expected cross-entropy
        (eq. 11, REINFORCE with the log-likelihood of the whole caption as the reward); its value has no meaning. The
        baseline is the one before this batch, so it does not depend on the draws of the batch; it is updated
        afterwards. The gradient of the entropy term, which keeps the weights from collapsing, passes through the
        weights alone. In evaluation mode, the cross-entropy.
        """
        run = self._run(images, captions[:, :-1])
        target = captions[:, 1:]
        real = target != self.config.pad
        tokens = real.sum()
        if not tokens:
            raise InputError("captions has only padding after the first token, expected at least one token to predict")
        losses = F.cross_entropy(run.logits.transpose(1, 2), target, ignore_index=self.config.pad, reduction="none")
        if self.config.attention == "soft":
            looked = torch.where(real[..., None], run.weights, 0).sum(1)
            return (losses.sum() + self.config.penalty * (1 - looked).square().sum()) / tokens
        if not self.training:
            return losses.sum() / tokens
        rewards = -losses.detach().sum(1)
        log_prob = torch.where(real, run.log_prob, 0).sum(1)
        logarithm = run.weights.clamp(min=torch.finfo(run.weights.dtype).tiny).log()  # finite where a weight is 0
        entropy = -torch.where(real[..., None], run.weights * logarithm, 0).sum()
        surrogate = ((rewards - self.baseline) * log_prob).sum() + self.config.entropy * entropy
        with torch.no_grad():
            self.baseline.lerp_(rewards.mean().to(self.baseline), 1 - BASELINE_DECAY)
        return (losses.sum() - surrogate) / tokens

    def maps(
        self, images: Float[Tensor, "b channels height width"], captions: Int[Tensor, "b t"]
    ) -> Float[Tensor, "b t gh gw"]:
        """Attention maps over the grid when the token after each token of the captions is predicted."""
        weights = self._run(images, captions).weights
        height, width = images.shape[2:]
        for _ in range(self.config.convolutions):
            height, width = (height + 1) // 2, (width + 1) // 2
        return weights.unflatten(2, (height, width))

    def start(self, images: Float[Tensor, "b channels height width"]) -> CaptionerState:
        """The state before the first token."""
        if images.ndim != 4 or images.shape[1] != self.config.channels or not images.numel():
            raise InputError(
                f"images has shape {tuple(images.shape)}, expected (batch, channels = {self.config.channels}, height, "
                "width)"
            )
        annotations = self.features(images).flatten(2).transpose(1, 2)
        mean = annotations.mean(1)
        hidden, cell = torch.tanh(self.first_hidden(mean)), torch.tanh(self.first_cell(mean))
        return CaptionerState(annotations, self.attention.project(annotations), hidden, cell)

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, "b n"], state: CaptionerState) -> Float[Tensor, "b vocabulary"]:
        """Logits of the next token after `tokens`, which follow the tokens in `state`; changes the state."""
        check_ids("tokens", tokens, self.config.vocab_size)
        for token in tokens.unbind(1):
            logits, _, _ = self._next(token, state)
        return logits

    def _run(self, images: Tensor, captions: Tensor) -> Run:
        check_ids("captions", captions, self.config.vocab_size)
        if len(images) != len(captions):
            raise InputError(f"captions has {len(captions)} items, expected {len(images)}, one for each image")
        state = self.start(images)
        steps = [self._next(token, state) for token in captions.unbind(1)]
        logits, weights, log_prob = zip(*steps, strict=True)
        return Run(torch.stack(logits, 1), torch.stack(weights, 1), torch.stack(log_prob, 1))

    def _next(self, token: Int[Tensor, " b"], state: CaptionerState) -> tuple[Tensor, Tensor, Tensor]:
        """Logits after one more token, weights α, and log-probability of the drawn cell; changes the state."""
        embedded = self.embedding(token)
        context, weights, log_prob = self._attend(state)
        if self.gate is not None:
            context = torch.sigmoid(self.gate(state.hidden)) * context
        state.hidden, state.cell = self.lstm(torch.cat([embedded, context], 1), (state.hidden, state.cell))
        out = embedded + self.from_hidden(state.hidden) + self.from_seen(context)
        return self.output(self.dropout(out)), weights, log_prob

    def _attend(self, state: CaptionerState) -> tuple[Tensor, Tensor, Tensor]:
        """Context vector, weights α, and log-probability of the drawn cell, with the previous state as the query."""
        query = state.hidden[:, None]
        if self.config.attention == "soft":
            mean, weights = self.attention(query, state.annotations, projected=state.projected, return_weights=True)
            return mean[:, 0], weights[:, 0], torch.zeros_like(query[:, 0, 0])
        choice = choose_keys(
            query[:, None],
            state.projected[:, None],
            score=Additive(self.attention.vector, self.attention.w_q),
            sample=self.training,
        )
        with serving(None):  # the weights of the choice above, which observers must not count twice
            _, weights = self.attention(query, state.annotations, projected=state.projected, return_weights=True)
        return choice.take(state.annotations[:, None])[:, 0, 0], weights[:, 0], choice.log_prob[:, 0, 0]
