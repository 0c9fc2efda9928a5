"""English sentences with their French and the words that translate one another, from a grammar.

Phrases are composed by rule: agreement, order, elision, contraction, negation. `qkv.lab.sentences` draws them.

What translates what: a determiner, noun, adjective, adverb, preposition or conjunction the same in the other language;
a pronoun its pronoun, wherever it stands; "ne" and "pas" both "not"; both words of "était assis" the one "sat"; "du"
(de + le) both "of" and "the". "do", "does" and "did" are translated by nothing, and so are the articles French has and
English has not ("i love music", "j' aime la musique"): those French words, and no others, are aligned to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

from qkv.errors import InputError
from qkv.lab import lexicon
from qkv.lab.lexicon import Adjective, Gender, Noun, Verb

__all__ = [
    "Pair",
    "Phrase",
    "Word",
    "adjective",
    "begins_with_vowel",
    "both",
    "clause",
    "conjunction",
    "finished",
    "joined",
    "late_adverb",
    "noun",
    "noun_phrase",
    "predicate",
    "prepositional",
    "pronoun_object",
    "relative_subject",
    "subject",
    "that",
    "verb",
    "vocabularies",
]


def __dir__() -> list[str]:
    return __all__


T = TypeVar("T")
VOWELS = frozenset("aeiouhâàéèêëîïôûœ")
ELIDED = {"le": "l'", "la": "l'", "je": "j'", "me": "m'", "ne": "n'", "de": "d'", "que": "qu'"}
CONTRACTED = {("de", "le"): "du", ("de", "les"): "des", ("à", "le"): "au", ("à", "les"): "aux"}
VERBS = (
    *lexicon.TRANSITIVE, *lexicon.INTRANSITIVE, *lexicon.PREPOSITIONAL, lexicon.GIVE, *lexicon.REPORTING,
    *lexicon.POSTURES,
)  # fmt: skip
SHORTEST = 4
"""The least of `max_words`."""


class Pair(NamedTuple):
    """A sentence, its translation, and of each word of the translation the places of the words it translates."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    alignment: tuple[tuple[int, ...], ...]


class Word:
    """A word of the source: this one, not any that is spelt so."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


Linked = tuple[str, tuple[Word, ...]]
"""A word of the target, and the words of the source it translates."""


class Phrase(NamedTuple):
    """Words of both languages in their orders; of a noun phrase also what agrees with it."""

    source: tuple[Word, ...]
    target: tuple[Linked, ...]
    person: int = 1
    """0 … 4, as the forms of a verb: i, one, we, you, many."""
    gender: Gender = "m"
    clitic: bool = False
    """Whether it is an object that stands before the verb."""

    @property
    def plural(self) -> bool:
        """Whether what agrees is plural ("you" is vous, of one or many: nothing may agree with it)."""
        return self.person in (2, 4)


# --- composed by rule ------------------------------------------------------------------------------------------------


def finished(phrase: Phrase) -> Pair:
    """The words as they are written: elided ("l' homme"), contracted ("du chat"), "a" or "an".

    >>> cat, black = noun("cat"), adjective("black")
    >>> finished(noun_phrase("the", cat, adjectives=[black])).target
    ('le', 'chat', 'noir')
    """
    place = {word: i for i, word in enumerate(phrase.source)}
    source = [word.text for word in phrase.source]
    for i, text in enumerate(source[:-1]):
        if text == "a" and source[i + 1][0] in "aeiou":
            source[i] = "an"
    texts = [text for text, _ in phrase.target]
    for i, text in enumerate(texts[:-1]):
        if text in ELIDED and begins_with_vowel(texts[i + 1]):
            texts[i] = ELIDED[text]
    target: list[str] = []
    alignment: list[tuple[int, ...]] = []
    for text, (_, words) in zip(texts, phrase.target, strict=True):
        links = tuple(place[word] for word in words)
        if target and (target[-1], text) in CONTRACTED:
            target[-1] = CONTRACTED[target[-1], text]
            alignment[-1] = tuple(sorted({*alignment[-1], *links}))
        else:
            target.append(text)
            alignment.append(links)
    return Pair(tuple(source), tuple(target), tuple(alignment))


def begins_with_vowel(french: str) -> bool:
    """Whether words before it are elided: a vowel or a mute h.

    >>> begins_with_vowel("homme"), begins_with_vowel("hibou")
    (True, False)
    """
    return french[0] in VOWELS and french not in lexicon.ASPIRATED


def noun(english: str) -> Noun:
    """The noun with this English singular."""
    return _by_english(lexicon.NOUNS, english)


def adjective(english: str) -> Adjective:
    """The adjective with this English."""
    return _by_english(lexicon.ADJECTIVES, english)


def verb(english: str) -> Verb:
    """The verb with this English base."""
    return _by_english(VERBS, english)


def noun_phrase(
    determiner: str, noun: Noun, *, plural: bool = False, adjectives: Sequence[Adjective] = (), negated: bool = False
) -> Phrase:
    """A noun with its determiner and adjectives.

    Args:
        determiner: its English: "the", "a" (of many and of mass nouns: "some"), "this", "my", …, "two"; "" for all of
            a kind, which has an article in French alone.
        noun: of `lexicon.NOUNS`.
        plural: whether there are many.
        adjectives: at most one before and one after the noun.
        negated: whether it is the object of a negated verb, where "a" is "de" in French, and "some" is "any".

    >>> finished(noun_phrase("a", noun("friend"), adjectives=[adjective("old")]))[:2]
    (('an', 'old', 'friend'), ('un', 'vieil', 'ami'))
    """
    head = Word(noun.english_plural if plural else noun.english)
    said = [(Word(a.english), a) for a in sorted(adjectives, key=lambda a: a.rank)]
    before, after = ([(w, a) for w, a in said if a.before is side] for side in (True, False))
    french = noun.french_plural if plural else noun.french
    target: list[Linked] = []
    for w, a in before:
        special = noun.gender == "m" and not plural and begins_with_vowel(french)
        target.append((a.m_vowel if special else a.agree(noun.gender, plural), (w,)))
    target += [(french, (head,)), *((a.agree(noun.gender, plural), (w,)) for w, a in after)]
    article, forms = _determined(determiner, noun, plural, negated, bool(before), begins_with_vowel(target[0][0]))
    source = (*article, *(w for w, _ in said), head)
    return Phrase(source, (*((f, article) for f in forms), *target), 4 if plural else 1, noun.gender)


def _determined(
    determiner: str, noun: Noun, plural: bool, negated: bool, preceded: bool, vowel: bool
) -> tuple[tuple[Word, ...], tuple[str, ...]]:
    """The determiner's English word and its French ones; `vowel`: whether one follows."""
    many = plural or noun.mass
    if determiner == "":
        return (), ("les" if plural else "le" if noun.gender == "m" else "la",)
    if determiner == "a" and (negated or many):
        if negated:
            return (Word("any" if many else "a"),), ("de",)
        if plural:
            return (Word("some"),), ("de" if preceded else "des",)
        return (Word("some"),), ("de", "le" if noun.gender == "m" else "la")
    entry = next(
        d for d in lexicon.DETERMINERS if determiner in ({d.english, d.english_plural} if plural else {d.english})
    )
    if plural:
        return (Word(entry.english_plural),), (entry.plural,)
    masculine = entry.m_vowel if vowel else entry.m
    return (Word(entry.english),), (masculine if noun.gender == "m" else entry.f_vowel if vowel else entry.f,)


def subject(english: str) -> Phrase:
    """A pronoun as subject: "i", "he", … "you" is vous, "they" ils."""
    english, french, person, gender = next(row for row in lexicon.SUBJECTS if row[0] == english)
    word = Word(english)
    return Phrase((word,), ((french, (word,)),), person, gender)  # type: ignore[arg-type]


def pronoun_object(english: str) -> Phrase:
    """A pronoun as object: "me", "him", …"""
    english, french, person = next(row for row in lexicon.OBJECTS if row[0] == english)
    word = Word(english)
    return Phrase((word,), ((french, (word,)),), person, clitic=True)


def joined(*phrases: Phrase) -> Phrase:
    """One after the other; what agrees does so with the first."""
    source = tuple(word for p in phrases for word in p.source)
    return phrases[0]._replace(source=source, target=tuple(x for p in phrases for x in p.target))


def both(first: Phrase, second: Phrase) -> Phrase:
    """Two noun phrases with "and": many, masculine unless both are feminine."""
    gender: Gender = "f" if first.gender == second.gender == "f" else "m"
    return joined(first, conjunction("and"), second)._replace(person=4, gender=gender)


def prepositional(english: str, object: Phrase) -> Phrase:
    """A preposition and what it governs."""
    return joined(_translated(english, lexicon.PREPOSITIONS[english]), object)


def conjunction(english: str) -> Phrase:
    """A conjunction."""
    return _translated(english, lexicon.CONJUNCTIONS[english])


def late_adverb(english: str) -> Phrase:
    """An adverb at the end of a clause."""
    return _translated(english, (lexicon.LATE_ADVERBS[english],))


def predicate(adjective: Adjective, subject: Phrase, *, very: bool = False) -> Phrase:
    """What someone is: an adjective that agrees with the subject."""
    word = Word(adjective.english)
    said = Phrase((word,), ((adjective.agree(subject.gender, subject.plural), (word,)),))
    return joined(_translated("very", ("très",)), said) if very else said


def clause(
    subject: Phrase, verb: Verb | None, *rest: Phrase, negation: str = "", adverb: str = "", past: bool = False
) -> Phrase:
    """A subject, what it does, and the rest: object, place, …

    Args:
        subject: a noun phrase, or a pronoun.
        verb: to be, if None.
        rest: what follows, in order; a pronoun as object comes first and stands before the verb in French.
        negation: "not" or "never".
        adverb: "often", …, instead of a negation.
        past: of "to be" and postures alone.

    >>> he, bread = subject("he"), noun_phrase("a", noun("bread"), negated=True)
    >>> finished(clause(he, verb("eat"), bread, negation="not"))[:2]
    (('he', 'does', 'not', 'eat', 'any', 'bread'), ('il', 'ne', 'mange', 'pas', 'de', 'pain'))
    """
    person = subject.person
    middle = tuple(Word(x) for x in (negation or adverb,) if x)
    posture = verb is None or verb.participle is not None
    if past and not posture:
        raise InputError(f"past is True with {verb and verb.english!r}, expected a posture or None (to be)")
    if verb is None:
        finite = Word((lexicon.BE_PAST if past else lexicon.BE)[person])
        english = (finite, *middle)
    elif negation == "not":
        finite = Word(verb.english)
        english = (Word("did" if past else "does" if person == 1 else "do"), *middle, finite)
    else:
        finite = Word(verb.english_past if past else verb.english_third if person == 1 else verb.english)
        english = (*middle, finite)
    forms = lexicon.ETRE_PAST if past else lexicon.ETRE if posture else verb.french  # type: ignore[union-attr]
    clitics = tuple(x for p in rest if p.clitic for x in p.target)
    french: list[Linked] = [*clitics, (forms[person], (finite,))]
    if negation:
        french = [("ne", middle), *french, ("pas" if negation == "not" else "jamais", middle)]
    elif adverb:
        french.append((lexicon.ADVERBS[adverb], middle))
    if verb is not None and verb.participle is not None:
        french.append((verb.participle.agree(subject.gender, subject.plural), (finite,)))
    return Phrase(
        (*subject.source, *english, *(w for p in rest for w in p.source)),
        (*subject.target, *french, *(x for p in rest if not p.clitic for x in p.target)),
    )


def relative_subject(antecedent: Phrase, human: bool) -> Phrase:
    """The subject of a relative clause: "who" or "that", which agrees as the noun before it does."""
    return _translated("who" if human else "that", ("qui",))._replace(
        person=antecedent.person, gender=antecedent.gender
    )


def that() -> Phrase:
    """ "that" before an object's relative clause, or before what is said."""
    return _translated("that", ("que",))


@cache
def vocabularies() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All words of the source, and all of the target, in alphabetical order."""
    english = {"an", "any", "do", "does", "did", "not", "never", "very", "who", "that"}
    french = {"ne", "pas", "jamais", "très", "qui", "que", "de", *ELIDED.values(), *CONTRACTED.values()}
    for n in lexicon.NOUNS:
        english |= {n.english, n.english_plural}
        french |= {n.french, n.french_plural}
    for v in VERBS:
        english |= {v.english, v.english_third, v.english_past}
        french |= {*v.french}
    for a in (*lexicon.ADJECTIVES, *(v.participle for v in lexicon.POSTURES if v.participle)):
        english.add(a.english)
        french |= {a.m, a.f, a.m_plural, a.f_plural, a.m_vowel}
    for d in lexicon.DETERMINERS:
        english |= {d.english, d.english_plural}
        french |= {*d[2:]}
    for row in (*lexicon.SUBJECTS, *lexicon.OBJECTS):
        english.add(row[0])
        french.add(row[1])
    for words in (lexicon.PREPOSITIONS, lexicon.CONJUNCTIONS):
        english |= {*words}
        french |= {x for row in words.values() for x in row}
    for adverbs in (lexicon.ADVERBS, lexicon.LATE_ADVERBS):
        english |= {*adverbs}
        french |= {*adverbs.values()}
    english |= {*lexicon.BE, *lexicon.BE_PAST}
    french |= {*lexicon.ETRE, *lexicon.ETRE_PAST}
    return tuple(sorted(english - {""})), tuple(sorted(french - {""}))


def _translated(english: str, french: Iterable[str]) -> Phrase:
    word = Word(english)
    return Phrase((word,), tuple((x, (word,)) for x in french))


def _by_english(entries: Iterable[T], english: str) -> T:
    found = next((x for x in entries if x.english == english), None)  # type: ignore[attr-defined]
    if found is None:
        raise InputError(f"{english!r} is no word of that class in the lexicon")
    return found
