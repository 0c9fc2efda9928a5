"""Experiments on small tasks: verdicts from made-up numbers, their modules, and quick forms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qkv
from qkv.scores import Dot
from qkv_lab import experiments, tasks
from qkv_lab.experiments import architecture, associations, bottleneck, experiment, head_numbers, small, texts
from qkv_lab.experiments.base import Outcome, Results
from qkv_lab.experiments.evidence import FAILS, HOLDS, ONLY, UNDECIDED, UNSEEN
from qkv_lab.task import Training

SMALL = (
    "coreference", "hops", "projections", "two_lookups", "four_lookups", "shared_keys", "score_functions",
    "linear_attention", "hard_attention", "recurrence", "no_mask", "extrapolation", "relative_positions", "lesson",
    "blocks", "text_sink", "dropout",
)  # fmt: skip


def rows(spread: float = 0.01, **entries: Any) -> list[Outcome]:
    """Four outcomes; each number is about the given one, and lists are the same in all.

    Names are `evaluation__loss` for the entry ``evaluation.loss``.
    """
    found = []
    for seed, shift in enumerate((-spread, 0.0, spread, 2 * spread)):
        of: dict[str, dict[str, Any]] = {"evaluation": {}, "check": {}, "measured": {}, "curves": {}}
        for name, value in entries.items():
            kind, entry = name.split("__")
            of[kind][entry.replace("_OF_", ".")] = value + shift if isinstance(value, float) else value
        found.append(Outcome(seed, **of))
    return found


def verdicts(name: str, variants: Mapping[str, Sequence[Outcome]]) -> dict[str, str]:
    """The verdicts of an experiment; its figure is drawn from the same numbers, too."""
    made, results = experiment(name), Results(variants)
    figure = made.figure(results)
    figure.canvas.draw()
    shown = " ".join(text.get_text() for text in figure.texts)
    found = made.conclude(results).verdicts
    for verdict in found:
        assert "nan" not in verdict.text
        assert verdict.criterion is not None
        assert verdict.criterion.dated == "2026-11-23"
        assert verdict.claim in shown
    return {verdict.claim: verdict.holds for verdict in found}


def test_coreference_counts_only_models_that_name_the_noun() -> None:
    def found(best: float, accuracy: float = 1.0, spread: float = 0.01) -> str:
        runs = rows(spread, check__best=best)
        runs = [Outcome(o.seed, {"accuracy": accuracy}, o.check) for o in runs]
        return verdicts("coreference", {associations.READER: runs})["C006"]

    assert [found(0.97), found(0.6), found(0.9, spread=0.2)] == [HOLDS, FAILS, UNDECIDED]
    assert found(0.97, accuracy=0.5) == UNSEEN


def test_hops_compare_three_layers_with_one() -> None:
    def found(one: float, three: float) -> str:
        made = {f"{n} layer{'s' * (n > 1)}": (one, 0.9, three)[n - 1] for n in (1, 2, 3)}
        return verdicts(
            "hops", {v: rows(evaluation__accuracy=x, evaluation__accuracy_by_hops=[1.0, x, x]) for v, x in made.items()}
        )["C059"]

    assert [found(0.4, 0.95), found(0.9, 0.92), found(0.9, 0.5)] == [HOLDS, FAILS, FAILS]


def test_projections_compare_three_with_none() -> None:
    def found(three: float, none: float) -> str:
        by_name = {"three": three, "one for all": 0.5, "X itself": none}
        return verdicts("projections", {v: rows(measured__accuracy=x) for v, x in by_name.items()})["C009"]

    assert [found(0.9, 0.3), found(0.5, 0.5)] == [HOLDS, FAILS]


def test_two_lookups_depend_on_the_feed_forward_layer() -> None:
    def found(with_one: float, without_one: float) -> str:
        made = experiment("two_lookups")
        accuracy = dict.fromkeys(made.settings(0, True), 0.99)
        accuracy |= {"1 head with a feed-forward layer": with_one, "1 head without a feed-forward layer": without_one}
        return verdicts(
            "two_lookups",
            {v: rows(0.001, evaluation__accuracy=x, check__best_first=0.9, check__best_second=0.9)
             for v, x in accuracy.items()},
        )["C031"]  # fmt: skip

    assert [found(0.99, 0.2), found(0.3, 0.2), found(0.99, 0.99)] == [ONLY, HOLDS, FAILS]


def test_four_lookups_compare_eight_heads_with_one() -> None:
    def found(eight: float, one: float) -> str:
        means = {"8 heads": eight, "1 head": one}
        return verdicts("four_lookups", {v: rows(measured__accuracy=x) for v, x in means.items()})["C324"]

    assert [found(0.99, 0.5), found(0.9, 0.9)] == [HOLDS, FAILS]


def test_shared_keys_judge_the_order_of_the_three() -> None:
    def found(multi_head: float, grouped: float, multi_query: float) -> str:
        losses = {"multi-head": multi_head, "grouped-query": grouped, "multi-query": multi_query}
        return verdicts(
            "shared_keys", {v: rows(evaluation__loss=x, evaluation__bigram_loss=2.4) for v, x in losses.items()}
        )["C308"]

    assert [found(2.0, 2.01, 2.03), found(2.0, 2.03, 2.01), found(2.0, 1.98, 2.03)] == [HOLDS, FAILS, FAILS]


def test_shared_keys_variants_have_equally_many_parameters() -> None:
    counts = {
        name: sum(p.numel() for p in setting.task.build().parameters())
        for name, setting in experiment("shared_keys").settings(0, False).items()
    }
    assert len(set(counts.values())) == 1, counts


def test_score_functions_are_compared_at_each_size() -> None:
    def found(additive: float, scaled: float, large: float) -> dict[str, str]:
        made = associations.ScoreFunctions()
        accuracy = {f"{s}, {n}": {"additive": additive, "dot": 0.5, "scaled dot": scaled}[s]
                    for n in made.sizes for s in made.scores}  # fmt: skip
        accuracy["scaled dot, 256"] = large
        return verdicts("score_functions", {v: rows(0.001, measured__accuracy=x) for v, x in accuracy.items()})

    assert found(0.99, 0.98, 0.98) == {"C257": HOLDS, "C261": HOLDS, "C332": FAILS, "C337": HOLDS}
    assert found(0.99, 0.98, 0.5) == {"C257": HOLDS, "C261": ONLY, "C332": FAILS, "C337": FAILS}
    assert found(0.5, 0.9, 0.9) == {"C257": FAILS, "C261": FAILS, "C332": HOLDS, "C337": HOLDS}


def test_linear_attention_is_judged_by_the_longest_list() -> None:
    def found(linear: float) -> str:
        means = {"softmax, 4 pairs": 1.0, "linear, 4 pairs": 1.0, "softmax, 48 pairs": 0.95, "linear, 48 pairs": linear}
        return verdicts("linear_attention", {v: rows(measured__accuracy=x) for v, x in means.items()})["C298"]

    assert [found(0.5), found(0.95)] == [HOLDS, FAILS]


def test_hard_attention_needs_reinforcement_only_if_nothing_else_learns() -> None:
    def found(straight: float, reinforce: float = 0.99) -> str:
        means = {"plain backpropagation": 0.3, "straight-through": straight, "REINFORCE": reinforce}
        return verdicts("hard_attention", {v: rows(measured__accuracy=x) for v, x in means.items()})["C365"]

    assert [found(0.99), found(0.3), found(0.3, reinforce=0.3)] == [FAILS, HOLDS, UNSEEN]


def test_recurrence_has_one_condition_for_each_task() -> None:
    def found(parity: float, rnn: float = 0.2) -> dict[str, str]:
        means = {
            "attention, recall": 0.99,
            "GRU, recall": 0.5,
            "attention, far": 0.99,
            "GRU, far": 0.3,
            "RNN, far": rnn,
        }
        means |= {"attention, parity": parity, "GRU, parity": 0.9}
        return verdicts("recurrence", {v: rows(0.001, measured__accuracy=x) for v, x in means.items()})

    assert found(0.5) == {"C146": HOLDS, "C291": ONLY, "C373": ONLY}
    assert found(0.99) == {"C146": HOLDS, "C291": HOLDS, "C373": HOLDS}
    assert found(0.9) == {"C146": HOLDS, "C291": ONLY, "C373": HOLDS}
    assert found(0.5, rnn=0.98)["C146"] == FAILS


def test_no_mask_separates_text_from_tasks_whose_answer_is_in_the_input() -> None:
    def found(reversal: float, leak: float = 0.05, read: float = 3.5, own: float = 0.0) -> dict[str, str]:
        text = {"evaluation__unigram_loss": 3.1}
        made = {
            "text, masked": rows(measured__training_loss=2.0, measured__writing_loss=2.0, **text),
            "text, unmasked": rows(0.001, measured__training_loss=leak, measured__writing_loss=read, **text),
            "own key visible": rows(measured__loss=2.0),
            "own key masked": rows(measured__loss=2.0 + own),
        }
        for name, written in (("copying", 0.1), ("reversal", reversal)):
            made[f"{name}, masked"] = rows(0.001, evaluation__token_accuracy=0.99, measured__training_loss=0.01)
            made[f"{name}, unmasked"] = rows(0.001, evaluation__token_accuracy=written, measured__training_loss=0.01)
        return verdicts("no_mask", made)

    assert found(0.99) == {"C158": ONLY, "C199": FAILS, "C200": ONLY}
    assert found(0.07, own=0.3) == {"C158": HOLDS, "C199": HOLDS, "C200": HOLDS}
    assert found(0.07, leak=1.5)["C200"] == UNSEEN


def test_extrapolation_compares_the_rises_of_the_loss() -> None:
    def found(sinusoidal: float, rotary: float) -> dict[str, str]:
        def runs(near: float, far: float) -> list[Outcome]:
            return [Outcome(s, {"loss_by_place": [2.0, 2.0 + near + s / 1000, 2.0 + far + s / 500]}) for s in range(4)]

        made = {kind: runs(0.0, 0.0) for kind in experiment("extrapolation").settings(0, True)}
        made |= {"sinusoidal": runs(sinusoidal / 2, sinusoidal), "rotary": runs(rotary / 2, rotary)}
        made |= {"learned": runs(2.0, 2.5)}
        return verdicts("extrapolation", made)

    assert found(1.0, 0.5) == {"C227": FAILS, "C228": HOLDS}
    assert found(0.05, 0.5) == {"C227": HOLDS, "C228": ONLY}


def test_relative_positions_are_judged_within_and_beyond_the_trained_length() -> None:
    def found(early: float, beyond: float, accuracy: float = 1.0) -> str:
        def runs(of_early: float, of_beyond: float) -> list[Outcome]:
            curve = {"evaluation.accuracy": {"steps": [0, 25, 50], "values": [0.0, of_early, accuracy]}}
            return [
                Outcome(s, {"accuracy": accuracy, "longer_accuracy": of_beyond + s / 1000}, curves=curve)
                for s in range(4)
            ]

        made = {kind: runs(0.5, 0.3) for kind in ("learned", "sinusoidal")}
        return verdicts("relative_positions", made | {kind: runs(early, beyond) for kind in ("t5", "rotary")})["C374"]

    assert [found(0.9, 0.9), found(0.5, 0.9), found(0.3, 0.3)] == [HOLDS, ONLY, FAILS]
    assert found(0.9, 0.9, accuracy=0.5) == UNSEEN


def test_lesson_claims_are_about_one_set_of_runs() -> None:
    def found(wrote: float, **measured: Any) -> dict[str, str]:
        kept = {"trained": wrote, "separator": [[0.0]], "token_before": [[0.1]], "distance": [5.6, 6.0], "even": 4.25}
        of_heads = {f"measured__{name}": x for name, x in ({**kept, "mirrors": 8} | measured).items()}
        runs = rows(
            0.001, evaluation__token_accuracy=wrote, check__best=0.99, check__without_best=wrote,
            check__without_mirrors=0.07, **of_heads,
        )  # fmt: skip
        return verdicts("lesson", {"the lesson's model": runs})

    assert found(0.99) == {
        "C213": HOLDS, "C214": HOLDS, "C215": HOLDS, "C220": FAILS, "C221": FAILS, "C223": HOLDS, "C224": ONLY,
    }  # fmt: skip
    other = found(0.5, token_before=[[0.9]], distance=[1.0, 6.0], trained=0.9)
    assert (other["C213"], other["C214"], other["C220"], other["C221"]) == (FAILS, FAILS, HOLDS, HOLDS)


def test_blocks_count_runs_that_end_worse_than_guessing() -> None:
    guess = math.log(64)

    def found(bare: Sequence[float | None], chained: float) -> dict[str, str]:
        def runs(losses: Sequence[float | None]) -> list[Outcome]:
            return [Outcome(s, measured={"losses": list(losses), "frequencies": 3.1 + s / 1000}) for s in range(4)]

        return verdicts(
            "blocks", {"both": runs([2.7, 2.9, 3.0]), "no norms": runs(bare), "no residuals": runs([chained, 3.2, 3.2])}
        )

    assert found([2.9, guess + 1, None], 3.1) == {"C050": HOLDS, "C051": HOLDS}
    assert found([2.9, 2.9, 2.9], 2.5) == {"C050": FAILS, "C051": UNDECIDED}


def test_text_sink_and_dropout_read_curves() -> None:
    def sink(plain: float, warm: float, free: float) -> str:
        curve = {"check.sink": {"steps": [0, 100], "values": [[[0.06]], [[plain]]]}}
        runs = {name: [Outcome(s, {"loss": 2.0}, check={"sink": [[x + s / 100]]}, curves=curve) for s in range(4)]
                for name, x in zip(texts.CONDITIONS, (plain, warm, free), strict=True)}  # fmt: skip
        return verdicts("text_sink", runs)["C139"]

    def dropout(without: float, left: float) -> str:
        def runs(rise: float) -> list[Outcome]:
            curves = [{"evaluation.loss": {"steps": [0, 50, 100], "values": [5.0, 2.0, 2.0 + rise + s / 1000]}}
                      for s in range(4)]  # fmt: skip
            return [Outcome(s, {"loss": 2.0}, measured={"train_loss": 1.0}, curves=c) for s, c in enumerate(curves)]

        return verdicts("dropout", {"no dropout": runs(without), "dropout 0.3": runs(left)})["C179"]

    assert [sink(0.8, 0.6, 0.5), sink(0.8, 0.1, 0.1), sink(0.1, 0.1, 0.1)] == [HOLDS, ONLY, FAILS]
    assert [dropout(1.0, 0.01), dropout(1.0, 0.5), dropout(0.5, 0.5)] == [HOLDS, ONLY, FAILS]


# --- modules and training ---------------------------------------------------------------------------------------------


def test_fit_follows_the_schedule_and_stops_when_the_loss_is_not_finite() -> None:
    layer = nn.Linear(1, 1, bias=False)
    start = layer.weight.item()
    plain = Training(steps=3, warmup=0, decay="none", weight_decay=0.0, clip=0.0, lr=0.5)
    losses = small.fit(layer, lambda step: 3 * layer(torch.ones(1, 1)).sum(), plain)
    assert layer.weight.item() == pytest.approx(start - 1.5, abs=1e-4), "Adam moves by the rate if slopes are constant"
    assert len(losses) == 3
    assert not layer.training
    assert len(small.fit(layer, lambda step: layer(torch.full((1, 1), math.nan)).sum(), plain)) == 1


def test_recall_of_a_recurrent_network_uses_the_loss_of_the_task() -> None:
    torch.manual_seed(0)
    model = bottleneck.RecurrentLM(18, "GRU")
    task = tasks.Recall(min_length=5, max_length=5)
    ids = task.batch(0, 3, 0)["ids"]
    expected = nn.functional.cross_entropy(model(ids)[:, 5:-1].flatten(0, 1), ids[:, 6:].flatten())
    torch.testing.assert_close(task.loss(model, {"ids": ids}), expected)


def test_hard_lookup_takes_the_value_of_the_best_key() -> None:
    torch.manual_seed(0)
    model = associations.Lookup(8, lambda _: Dot(), qkv.normalizers.Hard())
    (query, keys, values), _ = associations.questions(5, 4, torch.Generator().manual_seed(0))
    chosen = model.logits(query, keys).argmax(-1)
    torch.testing.assert_close(model(query, keys, values), associations._taken(model, values, chosen))


def test_four_questions_ask_for_keys_of_the_list() -> None:
    (asked, keys, values), answer = head_numbers.FourQuestions.questions(9, torch.Generator().manual_seed(0))
    for row in range(9):
        at = [keys[row].tolist().index(key) for key in asked[row].tolist()]
        assert len(set(at)) == 4
        assert values[row, at].tolist() == answer[row].tolist()
    counts = [sum(p.numel() for p in head_numbers.FourQuestions(h).parameters()) for h in (8, 1)]
    assert counts[0] == counts[1]


def test_next_colour_asks_for_the_token_of_the_next_symbol() -> None:
    symbols, colours, answer = associations.NextColour.tokens(np.random.default_rng(0), 4)
    for row in range(4):
        by_symbol = dict(zip(symbols[row].tolist(), colours[row].tolist(), strict=True))
        assert answer[row].tolist() == [by_symbol[(s + 1) % 12] for s in symbols[row].tolist()]


@torch.no_grad()
def test_shared_projections_have_symmetric_scores() -> None:
    x = torch.randn(1, 5, 32)
    for projections in (1, 0):
        model = associations.NextColour(projections)
        scores = model.q(x) @ model.k(x).mT
        torch.testing.assert_close(scores, scores.mT)
    model = associations.NextColour(3)
    scores = model.q(x) @ model.k(x).mT
    assert not torch.allclose(scores, scores.mT)


def test_block_without_residuals_forgets_its_input() -> None:
    model = architecture.Blocks.task.build()
    chained = architecture.Chained(model.blocks[0])
    x: Tensor = torch.randn(1, 4, 32)
    nn.init.zeros_(model.blocks[0].feed_forward.down.weight)
    assert bool((chained(x) == model.blocks[0].feed_forward.down.bias).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_quick_form_gives_a_number_for_each_claim(name: str, tmp_path: Path) -> None:
    result = experiments.run(name, tmp_path, quick=True)
    assert result.figure_path.stat().st_size > 5_000
    assert [v.claim for v in result.verdicts] == list(experiment(name).claims)
    assert all(v.text.startswith("quick form: ") for v in result.verdicts)
