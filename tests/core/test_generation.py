"""Sampling, streaming, text and beam search, on models whose next-token logits are known exactly.

The oracles: transformers' logits processors and beam search, enumeration of every continuation, and laws.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import close, rand, refusals, refused
from qkv.models.generation import Hypothesis, Sampler, beam_search, generate, pad_left, stream, text_stream
from qkv.models.pretrained import from_weights

GREEDY = Sampler(temperature=0)

# --- models -----------------------------------------------------------------------------------------------------------


class Rows:
    """A state: named tensors, all of a batch."""

    def __init__(self, **tensors: Tensor) -> None:
        self.__dict__.update(tensors)

    def reorder(self, rows: Tensor) -> None:
        self.__dict__.update({name: x[rows] for name, x in vars(self).items()})


class Memory(nn.Module):
    """Logits that depend on every token so far: m ← m / 2 + E[token], logits = 3 m. Padding leaves m as it is."""

    def __init__(self, vocabulary: int = 7, seed: int = 0) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.register_buffer("table", rand(vocabulary, vocabulary, seed=seed))
        self.part = nn.Dropout()  # some part that is in evaluation mode all the time
        self.part.eval()
        self.modes: list[tuple[bool, bool]] = []

    def start(self, batch: int = 1, *, padding: Tensor | None = None) -> Rows:
        padding = torch.zeros(batch, dtype=torch.long) if padding is None else padding
        return Rows(m=torch.zeros(batch, self.vocabulary, dtype=torch.float64), padding=padding)

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        self.modes.append((self.training, torch.is_inference_mode_enabled()))
        for column in tokens.T:
            state.m = torch.where(state.padding[:, None] > 0, state.m, state.m / 2 + self.table[column])
            state.padding = state.padding - 1
        return 3 * state.m


class Markov(nn.Module):
    """The last token alone decides; `chances` are the exact probabilities."""

    def __init__(self, chances: Tensor) -> None:
        super().__init__()
        self.vocabulary = chances.shape[-1]
        self.register_buffer("logits", chances.log())

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        return self.logits[tokens[:, -1]]


class Script(nn.Module):
    """Says what it was given, token by token."""

    def __init__(self, tokens: Sequence[int], vocabulary: int = 256) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.left = list(tokens)

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        return nn.functional.one_hot(torch.tensor([self.left.pop(0)]), self.vocabulary).double()


def chain(model: Memory, prompt: list[int], steps: int, end: Iterable[int] = ()) -> list[int]:
    """Greedy decoding by definition: the whole sequence again for each token."""
    out: list[int] = []
    while len(out) < steps:
        logits = model.step(torch.tensor([prompt + out]), model.start())
        token = int(logits[0].tolist().index(logits.max().item()))
        if token in end:
            break
        out.append(token)
    return out


# --- from logits to probabilities -------------------------------------------------------------------------------------

DISTINCT = st.lists(st.integers(-900, 900).map(lambda x: x / 100), min_size=2, max_size=9, unique=True)
TIED = st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=9)


def processed(logits: Tensor, seen: Tensor, sampler: Sampler) -> Tensor:
    """What transformers makes of the logits, with its processors in its order."""
    from transformers.generation import logits_process as hf

    processors = [hf.RepetitionPenaltyLogitsProcessor(float(sampler.repetition_penalty))]
    processors.append(hf.TemperatureLogitsWarper(float(sampler.temperature)))
    if sampler.top_k is not None:
        processors.append(hf.TopKLogitsWarper(sampler.top_k))
    if sampler.top_p is not None:
        processors.append(hf.TopPLogitsWarper(sampler.top_p))
    if sampler.min_p is not None:
        processors.append(hf.MinPLogitsWarper(sampler.min_p))
    for processor in processors:
        logits = processor(seen, logits)
    return logits.softmax(-1)


def same_as_transformers(logits: Tensor, sampler: Sampler, seen: Tensor | None = None) -> None:
    seen = torch.zeros(len(logits), 1, dtype=torch.long) if seen is None else seen
    want = processed(logits.clone(), seen, sampler)
    got = sampler.probabilities(logits, seen)
    assert torch.equal(got == 0, want == 0)
    close(got, want)


@given(DISTINCT | TIED, st.sampled_from(["top_k", "top_p", "min_p"]), st.integers(1, 10), st.floats(0.01, 1))
def test_each_filter_equals_that_of_transformers(logits: list[float], setting: str, k: int, p: float) -> None:
    x = torch.tensor([logits], dtype=torch.float64)
    if setting == "top_p":  # of ties ours keeps the first; on the edge itself rounding decides
        assume(len(set(logits)) == len(logits))
        assume(((x.softmax(-1).sort(descending=True).values.cumsum(-1) - p).abs() > 1e-9).all())
    if setting == "min_p":
        assume((((x - x.max()).exp() - p).abs() > 1e-9).all() or p == 1)
    same_as_transformers(x, Sampler(**{setting: k if setting == "top_k" else p}))  # type: ignore[arg-type]


def test_all_settings_apply_in_the_order_of_transformers() -> None:
    for seed in range(9):
        seen = torch.randint(23, (5, 11), generator=torch.Generator().manual_seed(seed))
        same_as_transformers(3 * rand(5, 23, seed=seed), Sampler(1.7, 13, 0.8, 0.05, 1.3), seen)


def test_top_p_keeps_the_fewest_tokens_and_the_first_of_ties() -> None:
    even = torch.zeros(1, 4)
    assert Sampler(top_p=0.5).probabilities(even).tolist() == [[0.5, 0.5, 0, 0]]
    assert Sampler(top_p=0.51).probabilities(even)[0, 3] == 0
    assert Sampler(top_p=0.76).probabilities(even).tolist() == [[0.25] * 4]
    many = Sampler(top_p=0.5).probabilities(torch.zeros(1, 256))[0]  # so many that an unstable sort would mix them
    assert many.nonzero()[:, 0].tolist() == list(range(128))
    assert Sampler(top_p=1e-9).probabilities(even).tolist() == [[1, 0, 0, 0]]


def test_penalty_ignores_ids_outside_the_vocabulary() -> None:
    x = rand(2, 5)
    sampler = Sampler(repetition_penalty=2.0)
    got = sampler.probabilities(x, torch.tensor([[-1, 3, 3], [-1, -1, 5]]))
    want = x.clone()
    want[0, 3] *= 2 if want[0, 3] < 0 else 0.5
    close(got, want.softmax(-1))


@pytest.mark.parametrize("sampler", [Sampler(), GREEDY, Sampler(top_k=2), Sampler(top_p=0.5), Sampler(min_p=0.5)])
def test_nan_logits_are_reported_with_their_row(sampler: Sampler) -> None:
    for bad in (math.nan, math.inf):
        chances = sampler.probabilities(torch.tensor([[0.0, 1.0, 0.5], [0.0, bad, 0.5]]))
        with refused("probabilities", "of row 1 sum to nan"):
            sampler.draw(chances, [torch.Generator(), torch.Generator()])


# --- streams of tokens ------------------------------------------------------------------------------------------------

PROMPTS = [[1, 2, 3], [4, 0, 6], [5, 5, 5]]


def test_greedy_takes_the_largest_logit_at_every_step_until_any_end_token() -> None:
    model, before = Memory(), torch.random.get_rng_state()
    settings: dict[str, Any] = {"max_new_tokens": 12, "sampling": GREEDY}
    whole = generate(model, model.start(3), torch.tensor(PROMPTS), **settings)
    assert whole == [chain(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(row) for row in whole}) == 3
    end = [whole[0][2], whole[1][4]]
    got = generate(model, model.start(3), torch.tensor(PROMPTS), end=end, **settings)
    assert got == [chain(model, prompt, 12, end) for prompt in PROMPTS]
    assert [len(row) for row in got] != [12] * 3
    assert torch.equal(torch.random.get_rng_state(), before)


def test_finished_items_give_minus_one_until_all_are_finished() -> None:
    got = stream(Markov(torch.eye(4).roll(1, 1)), None, torch.tensor([[0], [2]]), max_new_tokens=9, end=3)
    assert [x.tolist() for x in got] == [[1, 3], [2, -1], [3, -1]]  # 0 → 1 → 2 → 3


def test_tokens_are_sampled_with_the_models_probabilities_and_never_those_of_zero() -> None:
    chances = torch.tensor([[0.1, 0.2, 0.7], [0.0, 0.6, 0.4], [0.25, 0.75, 0.0]], dtype=torch.float64)
    n, steps = 3000, 3
    got = generate(Markov(chances), None, torch.zeros(n, 1, dtype=torch.long), max_new_tokens=steps, seed=7)
    came = torch.zeros(3, 3, dtype=torch.float64)
    for row in got:
        for before, after in itertools.pairwise([0, *row]):
            came[before, after] += 1
    total = came.sum(-1, keepdim=True)
    assert total.sum() == n * steps
    deviation = (total * chances * (1 - chances)).sqrt()
    assert ((came - total * chances).abs() <= 4 * deviation).all()


def test_tokens_of_a_seed_do_not_depend_on_the_batch() -> None:
    model = Memory()
    prompts = torch.tensor([[1, 2], [3, 4], [5, 6], [1, 2]])
    settings: dict[str, Any] = {"max_new_tokens": 15, "sampling": Sampler(9.0, top_k=5)}

    def tokens(rows: Tensor, seed: int | None) -> list[list[int]]:
        return generate(model, model.start(len(rows)), rows, seed=seed, **settings)

    first = tokens(prompts, 11)
    assert tokens(prompts, 11) == first
    assert tokens(prompts, 12) != first
    assert tokens(prompts, 11 + 2**32) != first
    assert first[0] != first[3]  # the same prompt at another place draws other tokens
    assert tokens(prompts[:1], 11) == first[:1]
    assert tokens(torch.stack([prompts[3], prompts[1]]), 11)[1] == first[1]
    assert tokens(prompts[[0, 3]], 1)[0] != tokens(prompts[[0, 3]], 0)[1]  # (1, 0) and (0, 1) are two seeds
    torch.manual_seed(3)
    free = tokens(prompts, None)
    torch.manual_seed(3)
    assert tokens(prompts, None) == free != tokens(prompts, None)


@pytest.mark.parametrize("sampling", [GREEDY, Sampler(1.5, repetition_penalty=1.8)])
def test_left_padding_does_not_change_tokens(sampling: Sampler) -> None:
    model = Memory()
    prompts = [[1, 2, 3, 4, 5], [6], [2, 2, 3]]
    ids, padding = pad_left(prompts, pad=3)
    assert ids.tolist() == [[1, 2, 3, 4, 5], [3, 3, 3, 3, 6], [3, 3, 2, 2, 3]]
    assert padding.tolist() == [0, 4, 2]
    assert ids.dtype == padding.dtype == torch.int64
    state = model.start(3, padding=padding)
    got = generate(model, state, ids, max_new_tokens=9, sampling=sampling, seed=5, padding=padding)
    for i, prompt in enumerate(prompts):  # alone, at the same place of a batch
        alone = torch.tensor([prompt] * 3)
        assert generate(model, model.start(3), alone, max_new_tokens=9, sampling=sampling, seed=5)[i] == got[i]


def test_penalty_applies_to_prompt_and_new_tokens_but_not_to_padding() -> None:
    """A penalty so large that what was seen comes last: after the prompt 2, 1 every other token comes once."""
    chances = torch.full((5, 5), 0.2, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) / 3
    model = Markov(chances * 1000)  # logits all positive
    sampling = Sampler(0, repetition_penalty=1e9)
    ids, padding = pad_left([[2, 1], [4]], pad=0)
    got = generate(model, None, ids, max_new_tokens=4, sampling=sampling, padding=padding)
    assert got == [[4, 3, 0, 4], [3, 2, 1, 0]]


def modes(model: Memory) -> list[bool]:
    return [module.training for module in model.modules()]


def throw(steps: Iterator[Tensor]) -> None:
    next(steps)
    with contextlib.suppress(RuntimeError):
        steps.throw(RuntimeError("the caller's"))  # type: ignore[attr-defined]


@pytest.mark.parametrize("use", [list, next, throw])
def test_model_runs_in_evaluation_mode_and_its_mode_is_restored(use: Callable[[Iterator[Tensor]], Any]) -> None:
    model = Memory()
    steps = stream(model, model.start(), torch.tensor([[1]]), max_new_tokens=3)
    use(steps)
    assert modes(model) == [True, False]
    assert set(model.modes) == {(False, True)}
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_autograd_and_training_mode_are_restored_between_steps_and_pieces() -> None:
    model, weight = Memory(), nn.Parameter(torch.ones(7))
    for tokens in stream(model, model.start(2), torch.tensor([[1], [2]]), max_new_tokens=3):
        assert modes(model) == [True, False]
        weight[tokens].sum().backward()  # neither inference mode, nor a tensor made in it
    assert weight.grad is not None
    assert weight.grad.sum() == 6
    wide = Memory(vocabulary=256)
    for _ in text_stream(wide, wide.start(), BYTES, "x", max_new_tokens=9, seed=0):
        assert modes(wide) == [True, False]
        break
    assert modes(wide) == [True, False]


# --- streams of text --------------------------------------------------------------------------------------------------


class Pieces:
    """Token i stands for given bytes of UTF-8; called, as some tokenizers are, not asked to encode."""

    def __init__(self, pieces: Sequence[str | bytes]) -> None:
        self.pieces = [x.encode() if isinstance(x, str) else x for x in pieces]

    def __call__(self, text: str) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([list(text.encode())], dtype=torch.long)}

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


BYTES = Pieces([bytes([i]) for i in range(256)])


def say(tokens: Sequence[int], tokenizer: Any = BYTES, **settings: Any) -> list[str]:
    """The pieces of text of a model that says `tokens`."""
    settings = {"max_new_tokens": len(tokens), "sampling": GREEDY} | settings
    return list(text_stream(Script(tokens), None, tokenizer, "x", **settings))


@given(st.text(st.sampled_from("aé€😀\ufffd"), min_size=1, max_size=8), st.binary(min_size=1, max_size=12))
def test_text_pieces_contain_whole_characters_and_concatenate_to_the_decoded_text(text: str, data: bytes) -> None:
    got = say(list(text.encode()))
    assert "".join(got) == text
    assert "\ufffd" in text or got == list(text)
    got = say(list(data))
    assert "".join(got) == data.decode(errors="replace")
    assert all(got)


@example(["xabcdy"], ["abcd", "bc"])
@example(list("xabcdy"), ["abcd", "bc"])
@example(["xab", "cdy"], ["abcd", "bc"])
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=7),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_work_across_tokens(pieces: list[str], stop: list[str]) -> None:
    text = "".join(pieces)
    want = text
    for end in range(len(text) + 1):  # character by character, the first that is complete; of those, the longest
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            want = text[: end - max(map(len, complete))]
            break
    got = say(range(len(pieces)), Pieces(pieces), stop=stop)
    assert "".join(got) == want
    assert all(got)


def test_only_incomplete_characters_and_beginnings_of_stop_strings_are_held_back() -> None:
    assert say([*b"a", 0xF0, 0x9F]) == ["a", "\ufffd"]
    assert say([0xF0, *b"a"]) == ["\ufffda"]
    assert say(range(4), Pieces(["one\n", "two\n", "\n", "three"]), stop=["\n\n"]) == ["one", "\ntwo"]
    assert say(range(2), Pieces(["one\n", "two"]), stop=["\n\n"]) == ["one", "\ntwo"]
    assert say(range(2), Pieces(["one", "\n"]), stop=["\n\n"]) == ["one", "\n"]  # it never came: flushed at the end


def test_text_and_id_prompts_give_the_same_text() -> None:
    model = Memory(vocabulary=256)
    kwargs: dict[str, Any] = {"max_new_tokens": 20, "sampling": Sampler(9.0), "seed": 1}
    texts = [
        "".join(text_stream(model, model.start(), BYTES, prompt, **kwargs))
        for prompt in ("hé", list("hé".encode()), torch.tensor(list("hé".encode())))
    ]
    tokens = generate(model, model.start(), torch.tensor([list("hé".encode())]), **kwargs)[0]
    assert texts == [BYTES.decode(tokens)] * 3
    assert len(texts[0]) > 5


@pytest.mark.parametrize("text", ["h€i €€😀 hi😀", "é hi"])
def test_tokenizers_with_bytes_to_fall_back_on(text: str) -> None:
    """SentencePiece-like, as Llama's: an incomplete character is one U+FFFD for each of its bytes."""
    import tokenizers as hf
    from transformers import PreTrainedTokenizerFast

    words = [*(f"<0x{i:02X}>" for i in range(256)), "▁", "h", "i"]
    made, steps = hf.Tokenizer(hf.models.BPE({x: i for i, x in enumerate(words)}, [], byte_fallback=True)), hf.decoders
    made.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend("▁"), hf.normalizers.Replace(" ", "▁")])
    made.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    ids = tokenizer.encode(text)
    got = list(text_stream(Script(ids, 259), None, tokenizer, text, max_new_tokens=len(ids), sampling=GREEDY))
    assert "".join(got) == tokenizer.decode(ids) == text
    assert len(got) >= len(text) - 1


# --- beam search ------------------------------------------------------------------------------------------------------


def exhaustive(model: Memory, prompt: list[int], longest: int, end: Sequence[int], penalty: float) -> list[Hypothesis]:
    """Every continuation that ends, or is of the longest length, best first."""

    def grow(tokens: list[int], score: float) -> Iterator[Hypothesis]:
        logits = model.step(torch.tensor([prompt + tokens]), model.start())
        for token, value in enumerate(logits.log_softmax(-1)[0].tolist()):
            length = len(tokens) + 1
            if token in end:
                yield Hypothesis(tokens, (score + value) / length**penalty)
            elif length == longest:
                yield Hypothesis([*tokens, token], (score + value) / length**penalty)
            else:
                yield from grow([*tokens, token], score + value)

    return sorted(grow([], 0.0), key=lambda h: -h.score)


@pytest.mark.parametrize(("penalty", "end"), [(-0.5, [1]), (0.0, [0, 2]), (0.7, []), (1.0, [1]), (2.0, [0, 2])])
def test_wide_beam_equals_exhaustive_search(penalty: float, end: list[int]) -> None:
    model = Memory(vocabulary=3)
    prompts = [[0, 1], [2, 2]]
    found = beam_search(
        model, model.start(2), torch.tensor(prompts),
        beams=81, max_new_tokens=4, end=end, length_penalty=penalty, num_return=9,
    )  # fmt: skip
    for got, prompt in zip(found, prompts, strict=True):
        want = exhaustive(model, prompt, 4, end, penalty)[:9]
        assert [h.tokens for h in got] == [h.tokens for h in want]
        assert [h.score for h in got] == pytest.approx([h.score for h in want], rel=1e-12)


@pytest.mark.parametrize(("penalty", "ends"), [(0.0, 2), (1.0, 1), (2.0, 2)])
def test_beam_search_equals_transformers(penalty: float, ends: int) -> None:
    """Both divide by the number of new tokens, the end token included, to the power of the penalty."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes, lengths = {"vocab_size": 11, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}, set()
    for seed in range(3):
        torch.manual_seed(seed)
        theirs = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.3, bos_token_id=None, eos_token_id=None))
        model = from_weights(theirs.config.to_dict(), theirs.state_dict())
        prompt = torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(seed))
        likely = generate(model, model.start(3), prompt, max_new_tokens=8, sampling=GREEDY)
        end = [likely[i][5] for i in range(ends)]
        want = theirs.eval().generate(
            prompt, attention_mask=torch.ones_like(prompt), num_beams=3, num_return_sequences=3, do_sample=False,
            early_stopping="never", length_penalty=penalty, max_new_tokens=8, eos_token_id=end, pad_token_id=0,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        got = beam_search(
            model, model.start(3), prompt,
            beams=3, max_new_tokens=8, end=end, length_penalty=penalty, num_return=3,
        )  # fmt: skip
        flat = list(itertools.chain.from_iterable(got))
        assert len(flat) == 9
        for h, ids, score in zip(flat, want.sequences[:, 4:].tolist(), want.sequences_scores.tolist(), strict=True):
            stops = [i for i, token in enumerate(ids) if token in end]
            assert h.tokens == (ids[: stops[0]] if stops else ids[:8])
            assert h.score == pytest.approx(score, rel=1e-4)
            lengths.add(len(h.tokens))
    assert len(lengths) > 1


def test_hypotheses_of_probability_zero_are_not_returned() -> None:
    step = torch.eye(4).roll(1, 1)  # 0 → 1 → 2 → 3, and nothing else
    found = beam_search(Markov(step), Rows(), torch.tensor([0, 2]), beams=3, max_new_tokens=5, end=3, num_return=3)
    assert found == [[Hypothesis([1, 2], 0.0)], [Hypothesis([], 0.0)]]


# --- what is refused --------------------------------------------------------------------------------------------------


streamed = functools.partial(stream, Memory(), None, max_new_tokens=3)  # not even asked for a first token
searched = functools.partial(beam_search, Memory(), None, max_new_tokens=3, end=None)
said = functools.partial(text_stream, Script([1]), None, BYTES, max_new_tokens=1)
ONE, NONE = torch.ones(2, 2, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long)
REFUSALS: list[tuple[str, Callable[[], object]]] = [
    ("temperature", lambda: Sampler(-1.0)), ("temperature", lambda: Sampler(math.inf)),
    ("top_k", lambda: Sampler(top_k=0)), ("top_p", lambda: Sampler(top_p=0.0)), ("top_p", lambda: Sampler(top_p=1.5)),
    ("min_p", lambda: Sampler(min_p=-0.1)), ("min_p", lambda: Sampler(min_p=1.1)),
    ("repetition_penalty", lambda: Sampler(repetition_penalty=0.0)),
    ("repetition_penalty", lambda: Sampler(repetition_penalty=math.inf)),
    ("generators", lambda: Sampler().draw(torch.full((2, 2), 0.5), [torch.Generator()])),
    ("seen", lambda: Sampler(repetition_penalty=2.0).probabilities(torch.zeros(1, 3))),
    ("prompts", lambda: pad_left([], pad=0)), ("prompts", lambda: pad_left([[1], []], pad=0)),
    ("prompt", lambda: streamed(NONE)), ("max_new_tokens", lambda: streamed(ONE, max_new_tokens=0)),
    ("end", lambda: streamed(ONE, end=7)), ("end", lambda: streamed(ONE, end=[1, -1])),
    ("seed", lambda: streamed(ONE, seed=-1)), ("padding", lambda: streamed(ONE, padding=ONE[0, :1])),
    ("padding", lambda: streamed(ONE, padding=torch.tensor([0, 2]))),
    ("padding", lambda: streamed(ONE, padding=torch.tensor([-1, 1]))),
    ("prompt", lambda: said("")), ("stop", lambda: said("x", stop="ab")), ("stop", lambda: said("x", stop=["a", ""])),
    ("prompt", lambda: searched(NONE)), ("end", lambda: searched(ONE, end=9)),
    ("beams", lambda: searched(ONE, beams=0)), ("num_return", lambda: searched(ONE, num_return=5)),
    ("num_return", lambda: searched(ONE, num_return=0)),
    ("length_penalty", lambda: searched(ONE, length_penalty=math.inf)),
]  # fmt: skip

test_arguments_out_of_range_are_refused_immediately = refusals(REFUSALS)
