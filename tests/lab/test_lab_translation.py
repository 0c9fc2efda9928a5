"""The English–French grammar, and the translation task."""

from __future__ import annotations

import json
from random import Random

import pytest
import torch

from conftest import refused
from qkv.errors import InputError
from qkv.models import save
from qkv_lab import grammar, lexicon, settings
from qkv_lab.grammar import (
    Pair,
    Phrase,
    adjective,
    both,
    clause,
    conjunction,
    finished,
    joined,
    late_adverb,
    noun,
    noun_phrase,
    predicate,
    prepositional,
    pronoun_object,
    relative_subject,
    subject,
    that,
    verb,
    vocabularies,
)
from qkv_lab.tasks.translation import ARCHITECTURES, Translation, alignment, is_held_out
from qkv_lab.translation import END, PAD, START, Vocabulary, cross_weights, read_vocabulary, sentence, translate

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
KNOWN = [
    (some("the", "cat", "black"), "the black cat", "le chat noir"),
    (
        clause(subject("i"), verb("love"), some("", "learning", "deep")),
        "i love deep learning",
        "j' aime l' apprentissage profond",
    ),
    (
        clause(some("the", "cat"), verb("sit"), prepositional("on", some("the", "mat")), past=True),
        "the cat sat on the mat",
        "le chat était assis sur le tapis",
    ),
    (
        clause(some("the", "girl"), verb("eat"), some("a", "apple", "red", negated=True), negation="not"),
        "the girl does not eat a red apple",
        "la fille ne mange pas de pomme rouge",
    ),
    (
        clause(WOMEN, verb("sit"), prepositional("under", some("the", "tree")), negation="not", past=True),
        "the women did not sit under the tree",
        "les femmes n' étaient pas assises sous l' arbre",
    ),
    (
        clause(subject("he"), verb("see"), pronoun_object("them"), negation="not"),
        "he does not see them",
        "il ne les voit pas",
    ),
    (
        clause(subject("i"), verb("hear"), pronoun_object("her"), negation="never"),
        "i never hear her",
        "je ne l' entends jamais",
    ),
    (some("a", "friend", "old", "italian"), "an old italian friend", "un vieil ami italien"),
    (some("a", "friend", "old", "famous", many=True), "some famous old friends", "de vieux amis célèbres"),
    (some("a", "horse", "white", many=True), "some white horses", "des chevaux blancs"),
    (some("this", "hotel", "new"), "this new hotel", "ce nouvel hôtel"),
    (some("this", "man"), "this man", "cet homme"),
    (some("this", "hero"), "this hero", "ce héros"),
    (some("that", "clock"), "that clock", "cette horloge"),
    (some("my", "school"), "my school", "mon école"),
    (some("my", "school", "old"), "my old school", "ma vieille école"),
    (some("their", "owl", "brown", many=True), "their brown owls", "leurs hiboux marron"),
    (some("the", "owl", "beautiful"), "the beautiful owl", "le beau hibou"),
    (some("a", "water"), "some water", "de l' eau"),
    (
        clause(subject("we"), verb("eat"), some("a", "bread", "good")),
        "we eat some good bread",
        "nous mangeons du bon pain",
    ),
    (
        clause(subject("they"), verb("drink"), some("a", "milk", negated=True), negation="not"),
        "they do not drink any milk",
        "ils ne boivent pas de lait",
    ),
    (
        clause(BOTH, None, predicate(adjective("happy"), BOTH)),
        "the man and the woman are happy",
        "l' homme et la femme sont heureux",
    ),
    (
        clause(subject("she"), None, predicate(adjective("beautiful"), subject("she"), very=True), past=True),
        "she was very beautiful",
        "elle était très belle",
    ),
    (
        clause(who_is(WOMEN, "sad"), verb("speak"), prepositional("to", some("the", "boy", many=True)), adverb="often"),
        "the women who are sad often speak to the boys",
        "les femmes qui sont tristes parlent souvent aux garçons",
    ),
    (
        joined(some("the", "book"), that(), clause(subject("she"), verb("read"))),
        "the book that she reads",
        "le livre qu' elle lit",
    ),
    (
        clause(subject("you"), verb("give"), some("a", "letter"), prepositional("to", some("the", "man"))),
        "you give a letter to the man",
        "vous donnez une lettre à l' homme",
    ),
    (
        joined(
            clause(subject("he"), verb("sleep"), late_adverb("today")), conjunction("because"),
            clause(some("the", "dog"), verb("work"), prepositional("near", some("the", "garden"))),
        ),
        "he sleeps today because the dog works near the garden",
        "il dort aujourd'hui parce que le chien travaille près du jardin",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    rng = Random(11)
    return [sentence(rng, 30) for _ in range(2500)]


def following(pair: Pair) -> list[tuple[str, str]]:
    return list(zip(pair.target[:-1], pair.target[1:], strict=True))


@pytest.mark.parametrize(("phrase", "english", "french"), KNOWN, ids=[row[1] for row in KNOWN])
def test_known_phrases_are_translated_correctly(phrase: Phrase, english: str, french: str) -> None:
    found = finished(phrase)
    assert (" ".join(found.source), " ".join(found.target)) == (english, french)


@pytest.mark.parametrize(
    ("row", "links"),
    [
        (0, [(0,), (2,), (1,)]),
        (1, [(0,), (1,), (), (3,), (2,)]),
        (2, [(0,), (1,), (2,), (2,), (3,), (4,), (5,)]),
        (5, [(0,), (2,), (4,), (3,), (2,)]),
        (18, [(0,), (0,), (1,)]),
    ],
)
def test_alignments_of_known_phrases(row: int, links: list[tuple[int, ...]]) -> None:
    assert list(finished(KNOWN[row][0]).alignment) == links


def test_contraction_is_aligned_to_both_words() -> None:
    near = finished(prepositional("of", some("the", "cat")))
    assert near == Pair(("of", "the", "cat"), ("du", "chat"), ((0, 1), (2,)))


def test_vocabulary_is_exactly_the_words_of_random_sentences() -> None:
    rng, used = Random(5), (set(), set())
    for _ in range(12_000):
        pair = sentence(rng, 30)
        used[0].update(pair.source)
        used[1].update(pair.target)
    for found, words in zip(used, vocabularies(), strict=True):
        assert found == set(words)
        assert len(words) == len(set(words))


def test_every_source_has_one_translation(pairs: list[Pair]) -> None:
    rng, known = Random(6), {}
    for pair in [*pairs, *(sentence(rng, 5) for _ in range(8_000))]:
        assert known.setdefault(pair.source, pair.target) == pair.target


def test_lengths_are_spread_up_to_max_words(pairs: list[Pair]) -> None:
    lengths = [len(pair.source) for pair in pairs]
    assert max(lengths) == 30
    assert min(lengths) <= 4
    for low in range(4, 29, 5):
        assert sum(low <= n < low + 5 for n in lengths) > 0.08 * len(lengths)


def test_only_inserted_articles_have_no_alignment(pairs: list[Pair]) -> None:
    for pair in pairs:
        assert len(pair.alignment) == len(pair.target)
        linked = {s for links in pair.alignment for s in links}
        assert linked <= set(range(len(pair.source)))
        assert all(pair.source[s] in {"do", "does", "did"} for s in set(range(len(pair.source))) - linked)
        assert all(
            word in {"le", "la", "l'", "les"}
            for word, links in zip(pair.target, pair.alignment, strict=True)
            if not links
        )


def test_elisions_and_contractions_are_complete(pairs: list[Pair]) -> None:
    for pair in pairs:
        for word, after in following(pair):
            vowel = grammar.begins_with_vowel(after)
            assert not (vowel and word in {"le", "la", "je", "me", "ne", "de", "que", "ce", "ma", "sa"})
            assert vowel or not (word.endswith("'") or word in {"cet", "bel", "vieil", "nouvel"})
            assert (word, after) not in grammar.CONTRACTED
        assert "a" not in [w for w, after in zip(pair.source[:-1], pair.source[1:], strict=True) if after[0] in "aeiou"]


def test_negation_surrounds_the_verb(pairs: list[Pair]) -> None:
    forms = {f for v in grammar.VERBS for f in (*v.french, *lexicon.ETRE, *lexicon.ETRE_PAST)}
    clitics = {"me", "m'", "le", "la", "l'", "nous", "vous", "les"}
    negated = 0
    for pair in pairs:
        for i, word in enumerate(pair.target):
            if word in {"ne", "n'"}:
                negated += 1
                rest = [w for w in pair.target[i + 1 : i + 4] if w not in clitics]
                assert rest[0] in forms
                assert rest[1] in {"pas", "jamais"}
                closing = pair.target.index(rest[1], i)
                assert pair.alignment[i] == pair.alignment[closing]
                assert pair.source[pair.alignment[i][0]] == ("not" if rest[1] == "pas" else "never")
    assert negated > 150


def test_articles_and_adjectives_agree_with_their_nouns(pairs: list[Pair]) -> None:
    nouns = {n.french: (n.gender, False) for n in lexicon.NOUNS} | {
        n.french_plural: (n.gender, True) for n in lexicon.NOUNS if n.french_plural and n.french_plural != n.french
    }
    same = {n.french for n in lexicon.NOUNS if n.french == n.french_plural}
    articles = {"le": ("m", False), "la": ("f", False), "un": ("m", False), "une": ("f", False), "ma": ("f", False)}
    after = {form: a for a in lexicon.ADJECTIVES if not a.before for form in a[1:5]}
    checked = 0
    for pair in pairs:
        for (word, links), (noun_, gold) in zip(
            zip(pair.target, pair.alignment, strict=True), zip(pair.target[1:], pair.alignment[1:], strict=True),
            strict=False,
        ):  # fmt: skip
            if word in articles and noun_ in nouns and links and gold:
                assert nouns[noun_][0] == articles[word][0]
                assert noun_ in same or nouns[noun_] == articles[word]
                checked += 1
            if word in nouns and word not in same and noun_ in after and gold and links and gold[0] < links[0]:
                assert after[noun_].agree(*nouns[word]) == noun_  # type: ignore[arg-type]
                checked += 1
    assert checked > 2000


def test_adjectives_that_follow_the_noun_are_reordered(pairs: list[Pair]) -> None:
    before = {a.english for a in lexicon.ADJECTIVES if a.before}
    after = {a.english for a in lexicon.ADJECTIVES if not a.before}
    nouns = {n.english for n in lexicon.NOUNS} | {n.english_plural for n in lexicon.NOUNS}
    for pair in pairs:
        at = {s: t for t, links in enumerate(pair.alignment) for s in links}
        for s, (a, b) in enumerate(zip(pair.source[:-1], pair.source[1:], strict=True)):
            if b in nouns and a in before | after:
                assert (at[s] < at[s + 1]) is (a in before), pair


def test_grammar_rejects_unknown_words_and_past_tenses() -> None:
    with refused("english"):
        noun("dragon")
    with refused("past"):
        clause(subject("i"), verb("eat"), past=True)
    with refused("max_words"):
        sentence(Random(0), 3)


# --- the task ---------------------------------------------------------------------------------------------------------


def sources(task: Translation, batch: dict[str, torch.Tensor]) -> list[tuple[str, ...]]:
    words = Vocabulary(vocabularies()[0])
    return [tuple(words.text([i for i in row if i != PAD])) for row in batch["source"].tolist()]


def test_batches_depend_on_their_arguments_only() -> None:
    task = Translation()
    first, again, other, later = (task.batch(step, 6, seed) for step, seed in ((5, 1), (5, 1), (5, 2), (6, 1)))
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert sources(task, first) != sources(task, other)
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
    if architecture == "rnn":
        assert checked == {}
        assert cross_weights(model, batch["source"], batch["target"]) is None
    else:
        heads = 2 if architecture == "transformer" else 1
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


def test_cross_weights_do_not_depend_on_later_target_words() -> None:
    """Row t has the weights with which word t + 1 is predicted."""
    task = settings.updated(TINY, {"architecture": "bahdanau"})
    torch.manual_seed(0)
    model = task.build().eval()
    batch = task.batch(0, 1, 0)
    short, long = (cross_weights(model, batch["source"], batch["target"][:, :n]) for n in (2, 4))
    assert short is not None
    assert long is not None
    torch.testing.assert_close(short, long[:, :, :, :2])


@pytest.mark.parametrize("architecture", ["rnn", "bahdanau", "transformer"])
def test_saved_model_translates_text(tmp_path, architecture: str) -> None:  # type: ignore[no-untyped-def]
    task = settings.updated(TINY, {"architecture": architecture})
    save(task.build(), tmp_path)
    for name, text in task.files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert [len(v) for v in read_vocabulary(tmp_path)] == [len(v) + 3 for v in vocabularies()]
    found = translate(tmp_path, "The black cat.")
    assert found.source == ["the", "black", "cat"]
    assert found.weights is None or found.weights.shape == (len(found.target), 3)
    with pytest.raises(InputError, match="'catt' is not in the vocabulary; did you mean 'cat'"):
        translate(tmp_path, "the catt")
    with refused("text"):
        translate(tmp_path, " . ")
    (tmp_path / "vocabulary.json").write_text("[]")
    with refused("model", match="not a vocabulary"):
        translate(tmp_path, "the cat")


@pytest.mark.parametrize(("name", "value"), [("architecture", "gru"), ("max_words", 31), ("held_out", 0)])
def test_settings_out_of_range_are_rejected(name: str, value: object) -> None:
    with refused(name):
        settings.updated(Translation(), {name: value})


@pytest.mark.slow
def test_small_model_learns_short_sentences() -> None:
    torch.manual_seed(0)
    task = Translation(architecture="transformer", d_model=48, layers=1, max_words=5, held_out=30)
    model = task.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, fused=True)
    losses = []
    for step in range(200):
        loss = task.loss(model, task.batch(step, 48, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        found, checked = task.evaluate(model), task.check(model)
    assert losses[0] > 5
    assert found["loss"] < 0.5
    assert found["exact_match"] > 0.4
    assert checked["best_accuracy"] > 0.6
