"""The English–French grammar, and the translation task."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from conftest import refused
from qkv.models import save
from qkv_lab import lexicon, settings
from qkv_lab.grammar import (
    VERBS,
    Pair,
    Phrase,
    both,
    clause,
    entry,
    finished,
    invariable,
    joined,
    noun_phrase,
    predicate,
    prepositional,
    pronoun_object,
    relative_subject,
    subject,
    vocabularies,
)
from qkv_lab.tasks.translation import ARCHITECTURES, Translation, alignment, is_held_out
from qkv_lab.translation import END, PAD, START, Vocabulary, cross_weights, read_vocabulary, sentence, translate

noun, adjective, verb = (partial(entry, words) for words in (lexicon.NOUNS, lexicon.ADJECTIVES, VERBS))
TINY = Translation(d_model=16, layers=1, heads=2, max_words=8, held_out=4)


def some(determiner: str, english: str, *adjectives: str, many: bool = False, negated: bool = False) -> Phrase:
    return noun_phrase(
        determiner, noun(english), plural=many, adjectives=[adjective(a) for a in adjectives], negated=negated
    )


def who_is(antecedent: Phrase, english: str) -> Phrase:
    relative = relative_subject(antecedent, human=True)
    return joined(antecedent, clause(relative, None, predicate(adjective(english), relative)))


WOMEN = some("the", "woman", many=True)
BOTH = both(some("the", "man"), some("the", "woman"))
MAT = prepositional("on", some("the", "mat"))
Links = list[tuple[int, ...]]
KNOWN: list[tuple[Phrase, str, str, Links | None]] = [  # with the words of the source that each word is linked to
    (some("the", "cat", "black"), "the black cat", "le chat noir", [(0,), (2,), (1,)]),
    (clause(subject("i"), verb("love"), some("", "learning", "deep")),
     "i love deep learning", "j' aime l' apprentissage profond", [(0,), (1,), (), (3,), (2,)]),
    (clause(some("the", "cat"), verb("sit"), MAT, past=True),
     "the cat sat on the mat", "le chat était assis sur le tapis", [(0,), (1,), (2,), (2,), (3,), (4,), (5,)]),
    (clause(some("the", "girl"), verb("eat"), some("a", "apple", "red", negated=True), negation="not"),
     "the girl does not eat a red apple", "la fille ne mange pas de pomme rouge", None),
    (clause(WOMEN, verb("sit"), prepositional("under", some("the", "tree")), negation="not", past=True),
     "the women did not sit under the tree", "les femmes n' étaient pas assises sous l' arbre", None),
    (clause(subject("he"), verb("see"), pronoun_object("them"), negation="not"),
     "he does not see them", "il ne les voit pas", [(0,), (2,), (4,), (3,), (2,)]),
    (clause(subject("i"), verb("hear"), pronoun_object("her"), negation="never"),
     "i never hear her", "je ne l' entends jamais", None),
    (some("a", "friend", "old", "italian"), "an old italian friend", "un vieil ami italien", None),
    (some("this", "hotel", "new"), "this new hotel", "ce nouvel hôtel", None),
    (some("this", "hero"), "this hero", "ce héros", None),
    (some("my", "school"), "my school", "mon école", None),
    (some("their", "owl", "brown", many=True), "their brown owls", "leurs hiboux marron", None),
    (some("a", "water"), "some water", "de l' eau", [(0,), (0,), (1,)]),
    (clause(BOTH, None, predicate(adjective("happy"), BOTH)),
     "the man and the woman are happy", "l' homme et la femme sont heureux", None),
    (clause(who_is(WOMEN, "sad"), verb("speak"), prepositional("to", some("the", "boy", many=True)), adverb="often"),
     "the women who are sad often speak to the boys", "les femmes qui sont tristes parlent souvent aux garçons", None),
    (joined(clause(subject("he"), verb("sleep"), invariable("today")), invariable("because"),
            clause(some("the", "dog"), verb("work"), prepositional("near", some("the", "garden")))),
     "he sleeps today because the dog works near the garden",
     "il dort aujourd'hui parce que le chien travaille près du jardin", None),
    (prepositional("of", some("the", "cat")), "of the cat", "du chat", [(0, 1), (2,)]),
]  # fmt: skip


@pytest.fixture(scope="module")
def every() -> list[Pair]:
    rng = Random(5)
    return [sentence(rng, 30) for _ in range(1_500)]


@pytest.mark.parametrize(("phrase", "english", "french", "links"), KNOWN, ids=[row[1] for row in KNOWN])
def test_known_phrases_are_translated_correctly(phrase: Phrase, english: str, french: str, links: Links | None) -> None:
    found = finished(phrase)
    assert (" ".join(found.source), " ".join(found.target)) == (english, french)
    assert links is None or list(found.alignment) == links


@pytest.mark.slow
def test_every_source_has_one_translation(every: list[Pair]) -> None:
    rng, known = Random(6), {}
    for pair in [*every, *(sentence(rng, 5) for _ in range(1_000))]:
        assert known.setdefault(pair.source, pair.target) == pair.target


def test_only_inserted_articles_have_no_alignment(every: list[Pair]) -> None:
    for pair in every:
        assert len(pair.alignment) == len(pair.target)
        linked = {s for links in pair.alignment for s in links}
        assert linked <= set(range(len(pair.source)))
        assert all(pair.source[s] in {"do", "does", "did"} for s in set(range(len(pair.source))) - linked)
        assert all(
            word in {"le", "la", "l'", "les"}
            for word, links in zip(pair.target, pair.alignment, strict=True)
            if not links
        )


# --- the task ---------------------------------------------------------------------------------------------------------


def sources(task: Translation, batch: dict[str, torch.Tensor]) -> list[tuple[str, ...]]:
    words = Vocabulary(vocabularies()[0])
    return [tuple(words.text([i for i in row if i != PAD])) for row in batch["source"].tolist()]


def test_sentences_begin_and_end_once_and_are_drawn_again_for_each_step() -> None:
    task = Translation()
    first, later = (task.batch(step, 6, 1) for step in (5, 6))
    assert not set(sources(task, first)) & set(sources(task, later))
    target = first["target"]
    assert (target[:, 0] == START).all()
    assert ((target == END).sum(1) == 1).all()
    assert task.count(first) == int((target != PAD).sum()) - 6


def test_held_out_sentences_are_never_trained_on() -> None:
    task = Translation(max_words=8, held_out=20)
    groups = task.unseen()
    assert groups == task.unseen()
    assert [len(group) for group in groups] == [20, 20]
    unseen = {pair.source for group in groups for pair in group}
    assert len(unseen) == 40
    assert all(is_held_out(pair) for group in groups for pair in group)
    for step in range(40):
        assert not unseen & set(sources(task, task.batch(step, 16, 0)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_built_evaluated_and_checked(architecture: str) -> None:
    task = settings.updated(TINY, {"architecture": architecture})
    model = task.build()
    batch = task.batch(0, 5, 0)
    assert torch.isfinite(task.loss(model, batch))
    model.eval()
    with torch.no_grad():
        found, checked = task.evaluate(model), task.check(model)
    assert set(found) == {"exact_match", "bleu", "loss", "exact_match_by_length", "bleu_by_length"}
    assert len(found["bleu_by_length"]) == len(task.groups) == 2
    json.dumps([found, checked])
    if architecture in ("rnn", "tanh-rnn"):
        assert checked == {}
        assert cross_weights(model, batch["source"], batch["target"]) is None
    else:
        heads = 2 if architecture in ("transformer", "multihead") else 1
        assert [len(layer) for layer in checked["aer"]] == [heads]
        assert 0 <= checked["best_aer"] <= 1
        weights = cross_weights(model, batch["source"], batch["target"][:, :-1])
        assert weights is not None
        assert weights.shape[:3] == (1, heads, 5)
        assert (weights.masked_select((batch["source"] == PAD)[:, None]) == 0).all()
    if architecture in ("rnn", "transformer"):
        assert set(task.figures(model)) == ({"length"} if architecture == "rnn" else {"length", "alignment"})


def test_alignment_metrics_of_hand_made_weights() -> None:
    pair = Pair(("of", "the", "black", "cat"), ("du", "chat", "noir"), ((0, 1), (3,), (2,)))
    right = torch.tensor([[[0.1, 0.9, 0, 0], [0, 0, 0, 1.0], [0, 0, 1.0, 0]]])
    found = alignment(right, [pair])
    assert found["aer"] == pytest.approx(1 - 2 * 3 / (3 + 4))
    assert found["accuracy"] == 1
    wrong = right.flip(-1)
    assert alignment(wrong, [pair])["aer"] == pytest.approx(1 - 0)
    uniform = torch.full((1, 3, 4), 0.25)
    assert alignment(uniform, [pair])["entropy"] == pytest.approx(torch.tensor(4.0).log().item())
    unlinked = pair._replace(alignment=((), (3,), (2,)))
    assert alignment(wrong, [unlinked])["aer"] == 1
    assert alignment(right, [unlinked])["aer"] == 0


@pytest.mark.parametrize("architecture", ["rnn", "transformer"])
def test_saved_model_translates_text(tmp_path: Path, architecture: str) -> None:
    task = settings.updated(TINY, {"architecture": architecture})
    save(task.build(), tmp_path)
    for name, text in task.files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert [len(v) for v in read_vocabulary(tmp_path)] == [len(v) + 3 for v in vocabularies()]
    found = translate(tmp_path, "The black cat.")
    assert found.source == ["the", "black", "cat"]
    assert found.weights is None or found.weights.shape == (len(found.target), 3)
    for argument, text in (("word", "the catt"), ("text", " . ")):
        with refused(argument):
            translate(tmp_path, text)
    (tmp_path / "vocabulary.json").write_text("[]")
    with refused("model", match="not a vocabulary"):
        translate(tmp_path, "the cat")
