"""A grammar of English–French sentence pairs with their word alignments.

Phrases are composed by rules: agreement, word order, elision, contraction, negation. `qkv_lab.translation` draws them.

Alignment: determiners, nouns, adjectives, adverbs, prepositions, conjunctions and pronouns are aligned to their
translations; "ne" and "pas" both to "not"; both words of "était assis" to "sat"; "du" (de + le) to "of" and "the".
"do", "does" and "did" have no translation. The articles that only French has ("i love music", "j' aime la musique")
are the only French words without an alignment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

from qkv.errors import InputError
from qkv_lab import lexicon
from qkv_lab.lexicon import Adjective, Gender, Noun, Verb

T = TypeVar("T")
VOWELS = frozenset("aeiouhâàéèêëîïôûœ")
ELIDED = {"le": "l'", "la": "l'", "je": "j'", "me": "m'", "ne": "n'", "de": "d'", "que": "qu'"}
CONTRACTED = {("de", "le"): "du", ("de", "les"): "des", ("à", "le"): "au", ("à", "les"): "aux"}
VERBS = (
    *lexicon.TRANSITIVE, *lexicon.INTRANSITIVE, *lexicon.PREPOSITIONAL, lexicon.GIVE, *lexicon.REPORTING,
    *lexicon.POSTURES,
)  # fmt: skip
INVARIABLE: dict[str, Sequence[str]] = {
    **lexicon.PREPOSITIONS, **lexicon.CONJUNCTIONS, **{x: [french] for x, french in lexicon.LATE_ADVERBS.items()},
    "that": ["que"], "very": ["très"],
}  # fmt: skip
"""Words of one form, with their French words."""
SHORTEST = 4
"""The smallest possible value of `max_words`."""


class Pair(NamedTuple):
    """A sentence, its translation, and for each translated word the positions of its source words."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    alignment: tuple[tuple[int, ...], ...]


class Word:
    """One occurrence of a source word; two occurrences of the same word are different objects."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


Linked = tuple[str, tuple[Word, ...]]
"""A target word, and the source words that it translates."""


class Phrase(NamedTuple):
    """The words of a phrase in both languages, with the person and gender for agreement."""

    source: tuple[Word, ...]
    target: tuple[Linked, ...]
    person: int = 1
    """0 … 4, the index of the verb form: i, he, we, you, they."""
    gender: Gender = "m"
    clitic: bool = False
    """True for object pronouns, which precede the verb in French."""

    @property
    def plural(self) -> bool:
        """True if words that agree with it are plural. ("you" is vous, for one or many; nothing may agree with it.)"""
        return self.person in (2, 4)


# --- composed by rule ------------------------------------------------------------------------------------------------


def finished(phrase: Phrase) -> Pair:
    """The pair with its final spelling: elision ("l' homme"), contraction ("du chat"), "a" or "an".

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
    """True if words before it are elided: it begins with a vowel or a mute h.

    >>> begins_with_vowel("homme"), begins_with_vowel("hibou")
    (True, False)
    """
    return french[0] in VOWELS and french not in lexicon.ASPIRATED


def noun(english: str) -> Noun:
    """The noun with an English singular; `InputError` if there is none."""
    return _by_english(lexicon.NOUNS, english)


def adjective(english: str) -> Adjective:
    """The adjective with an English form; `InputError` if there is none."""
    return _by_english(lexicon.ADJECTIVES, english)


def verb(english: str) -> Verb:
    """The verb with an English base form; `InputError` if there is none."""
    return _by_english(VERBS, english)


def noun_phrase(
    determiner: str, noun: Noun, *, plural: bool = False, adjectives: Sequence[Adjective] = (), negated: bool = False
) -> Phrase:
    """A noun with its determiner and adjectives.

    Args:
        determiner: the English determiner: "the", "a" ("some" with plural and mass nouns), "this", "my", …, "two"; ""
            for a generic noun phrase, which has an article in French only.
        noun: a noun of the lexicon.
        plural: True for the plural.
        adjectives: at most one that precedes and one that follows the noun in French.
        negated: True for the object of a negated verb, where "a" becomes "de" in French, and "some" becomes "any".

    >>> finished(noun_phrase("a", noun("friend"), adjectives=[adjective("old")]))[:2]
    (('an', 'old', 'friend'), ('un', 'vieil', 'ami'))
    """
    head = Word(noun.english_plural if plural else noun.english)
    words = [(Word(a.english), a) for a in sorted(adjectives, key=lambda a: a.rank)]
    before, after = ([(w, a) for w, a in words if a.before is side] for side in (True, False))
    french = noun.french_plural if plural else noun.french
    target: list[Linked] = []
    for w, a in before:
        special = noun.gender == "m" and not plural and begins_with_vowel(french)
        target.append((a.m_vowel if special else a.agree(noun.gender, plural), (w,)))
    target += [(french, (head,)), *((a.agree(noun.gender, plural), (w,)) for w, a in after)]
    article, forms = _determiner(determiner, noun, plural, negated, bool(before), begins_with_vowel(target[0][0]))
    source = (*article, *(w for w, _ in words), head)
    return Phrase(source, (*((f, article) for f in forms), *target), 4 if plural else 1, noun.gender)


def _determiner(
    determiner: str, noun: Noun, plural: bool, negated: bool, preceded: bool, vowel: bool
) -> tuple[tuple[Word, ...], tuple[str, ...]]:
    """The English determiner and its French words.

    Args:
        determiner: as for `noun_phrase`.
        noun: its noun.
        plural: True for the plural.
        negated: True for the object of a negated verb.
        preceded: True if an adjective precedes the noun in French.
        vowel: True if the next French word begins with a vowel.
    """
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
    return Phrase((word,), ((french, (word,)),), person, gender)


def pronoun_object(english: str) -> Phrase:
    """A pronoun as object: "me", "him", …"""
    english, french, person = next(row for row in lexicon.OBJECTS if row[0] == english)
    word = Word(english)
    return Phrase((word,), ((french, (word,)),), person, clitic=True)


def joined(*phrases: Phrase) -> Phrase:
    """Concatenate phrases; agreement follows the first."""
    source = tuple(word for p in phrases for word in p.source)
    return phrases[0]._replace(source=source, target=tuple(x for p in phrases for x in p.target))


def both(first: Phrase, second: Phrase) -> Phrase:
    """Two noun phrases joined by "and": plural, and masculine unless both are feminine."""
    gender: Gender = "f" if first.gender == second.gender == "f" else "m"
    return joined(first, invariable("and"), second)._replace(person=4, gender=gender)


def invariable(english: str) -> Phrase:
    """A word of one form: a preposition, a conjunction, an adverb at the end of a clause, "that" or "very"."""
    word = Word(english)
    return Phrase((word,), tuple((french, (word,)) for french in INVARIABLE[english]))


def prepositional(english: str, object: Phrase) -> Phrase:
    """A preposition with its object."""
    return joined(invariable(english), object)


def predicate(adjective: Adjective, subject: Phrase, *, very: bool = False) -> Phrase:
    """A predicative adjective that agrees with the subject."""
    word = Word(adjective.english)
    said = Phrase((word,), ((adjective.agree(subject.gender, subject.plural), (word,)),))
    return joined(invariable("very"), said) if very else said


def clause(
    subject: Phrase, verb: Verb | None, *rest: Phrase, negation: str = "", adverb: str = "", past: bool = False
) -> Phrase:
    """A clause: subject, verb, and the rest (objects, places, …).

    Args:
        subject: a noun phrase or a pronoun.
        verb: the verb; None for "to be".
        rest: the phrases after the verb, in order. An object pronoun comes first; it precedes the verb in French.
        negation: "not" or "never".
        adverb: "often", …; not together with a negation.
        past: past tense; only for "to be" and posture verbs.

    >>> he, bread = subject("he"), noun_phrase("a", noun("bread"), negated=True)
    >>> finished(clause(he, verb("eat"), bread, negation="not"))[:2]
    (('he', 'does', 'not', 'eat', 'any', 'bread'), ('il', 'ne', 'mange', 'pas', 'de', 'pain'))
    """
    person = subject.person
    middle = tuple(Word(x) for x in (negation or adverb,) if x)
    posture = verb is None or verb.participle is not None
    if past and not posture:
        raise InputError(f"past is True with {verb and verb.english!r}, expected a posture verb or None (to be)")
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
    """The subject of a relative clause, "who" or "that", which agrees with its antecedent."""
    word = Word("who" if human else "that")
    return Phrase((word,), (("qui", (word,)),), antecedent.person, antecedent.gender)


@cache
def vocabularies() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All English words and all French words, in alphabetical order."""
    adjectives = (*lexicon.ADJECTIVES, *(v.participle for v in lexicon.POSTURES if v.participle))
    pronouns = [(english, french) for english, french, *_ in (*lexicon.SUBJECTS, *lexicon.OBJECTS)]
    phrases = lexicon.PREPOSITIONS | lexicon.CONJUNCTIONS
    adverbs = lexicon.ADVERBS | lexicon.LATE_ADVERBS
    english = {
        "an", "any", "do", "does", "did", "not", "never", "very", "who", "that",
        *lexicon.BE, *lexicon.BE_PAST, *phrases, *adverbs, *(a.english for a in adjectives), *(x for x, _ in pronouns),
        *(x for entry in (*lexicon.NOUNS, *lexicon.DETERMINERS) for x in entry[:2]),
        *(x for v in VERBS for x in (v.english, v.english_third, v.english_past)),
    }  # fmt: skip
    french = {
        "ne", "pas", "jamais", "très", "qui", "que", "de", *ELIDED.values(), *CONTRACTED.values(),
        *lexicon.ETRE, *lexicon.ETRE_PAST, *adverbs.values(), *(x for row in phrases.values() for x in row),
        *(x for _, x in pronouns), *(x for n in lexicon.NOUNS for x in (n.french, n.french_plural)),
        *(x for v in VERBS for x in v.french), *(x for a in adjectives for x in a[1:6]),
        *(x for d in lexicon.DETERMINERS for x in d[2:]),
    }  # fmt: skip
    return tuple(sorted(english - {""})), tuple(sorted(french - {""}))


def _by_english(entries: Iterable[T], english: str) -> T:
    found = next((x for x in entries if x.english == english), None)  # type: ignore[attr-defined]
    if found is None:
        raise InputError(f"english is {english!r}, expected a word of that class in the lexicon")
    return found
