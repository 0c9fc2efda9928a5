"""A grammar of English–French sentence pairs with their word alignments.

Phrases are composed by rules (agreement, word order, elision, contraction, negation), and `sentence` draws them.

Alignment: determiners, nouns, adjectives, adverbs, prepositions, conjunctions and pronouns are aligned to their
translations; "ne" and "pas" both to "not"; both words of "était assis" to "sat"; "du" (de + le) to "of" and "the".
"do", "does" and "did" have no translation. The articles that only French has ("i love music", "j' aime la musique")
are the only French words without an alignment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from random import Random
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

    >>> cat, black = entry(lexicon.NOUNS, "cat"), entry(lexicon.ADJECTIVES, "black")
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

    >>> friend, old = entry(lexicon.NOUNS, "friend"), entry(lexicon.ADJECTIVES, "old")
    >>> finished(noun_phrase("a", friend, adjectives=[old]))[:2]
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

    >>> he, bread = subject("he"), noun_phrase("a", entry(lexicon.NOUNS, "bread"), negated=True)
    >>> finished(clause(he, entry(VERBS, "eat"), bread, negation="not"))[:2]
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


def entry(entries: Iterable[T], english: str) -> T:
    """The entry of the lexicon with an English base form; `InputError` if there is none."""
    found = next((x for x in entries if x.english == english), None)  # type: ignore[attr-defined]
    if found is None:
        raise InputError(f"english is {english!r}, expected a word of that class in the lexicon")
    return found


# --- drawn at random --------------------------------------------------------------------------------------------------


def sentence(rng: Random, max_words: int = 30) -> Pair:
    """A random sentence, or a noun phrase, of at most `max_words` English words; lengths are about equally frequent.

    >>> print(*sentence(Random(3), 8).target)
    j' habite dans ce jardin
    """
    if max_words < SHORTEST:
        raise InputError(f"max_words is {max_words}, expected at least {SHORTEST}")
    draw = _Draw(rng)
    while True:
        words = SHORTEST + draw.below(max_words - SHORTEST + 1)
        phrase = draw.nouns(words, ALL) if words < 8 and draw.chance(0.12) else draw.sentence(words)
        if len(phrase.source) <= max_words:
            return finished(phrase)


ALL = frozenset({*lexicon.SEEN, "food"})
PERSONS = frozenset({"person"})
BEINGS = frozenset(lexicon.BEING)
PLACES = {
    "in": frozenset({"place"}), "on": frozenset({"flat"}), "under": frozenset({"tree", "flat"}),
    "behind": frozenset({"place", "tree", "person", "animal"}),
    "near": frozenset({"place", "tree", "person", "animal"}),
    "with": frozenset({"person", "animal"}),
}  # fmt: skip
EVERYONE, GENDERED = tuple(row[0] for row in lexicon.SUBJECTS), ("he", "she", "they")
"""Subject pronouns: all, and those with a definite gender."""
AROUND = ("behind", "near")
"""Prepositions for the location of a place."""
OWNED = frozenset({"thing", "animal", "place", "text"})
OWNERS = ("the", "the", "the", "the", "this", "that", "my", "his", "her", "our", "your", "their")
"""Definite determiners; repeated entries are drawn more often."""
PLAIN = tuple(a.english for a in lexicon.ADJECTIVES if a.rank >= 3)
"""Adjectives that "very" does not modify."""


class _Draw:
    """Draws random phrases; `words` is the approximate number of English words of a phrase."""

    def __init__(self, rng: Random) -> None:
        self.random = rng.random  # unlike `choice`, guaranteed to be the same in all versions of Python

    def below(self, n: int) -> int:
        return int(self.random() * n)

    def chance(self, p: float) -> bool:
        return self.random() < p

    def pick(self, values: Sequence[T]) -> T:
        return values[int(self.random() * len(values))]

    def sentence(self, words: int) -> Phrase:
        """One clause, or several joined by conjunctions or reported speech."""
        if words >= 9 and self.chance(min(0.85, words / 20)):
            if self.chance(0.2):
                who = self.subject(3, PERSONS)
                verb = self.pick(lexicon.REPORTING)
                adverb = self.adverb()
                said = clause(who, verb, invariable("that"), adverb=adverb)
                return joined(said, self.sentence(words - len(said.source)))
            first = self.clause(4 + self.below(words - 8))
            rest = self.sentence(words - 1 - len(first.source))
            return joined(first, invariable(self.pick(tuple(lexicon.CONJUNCTIONS))), rest)
        return self.clause(words)

    def clause(self, words: int) -> Phrase:
        """A subject with a predicate."""
        late = words >= 6 and self.chance(0.08)
        if late:
            words -= 1
        what = self.random()
        if what < 0.24:
            said = self.state(words)
        else:
            verbs = (
                lexicon.INTRANSITIVE if what < 0.34 else lexicon.PREPOSITIONAL if what < 0.44 else lexicon.TRANSITIVE
            )
            verb = lexicon.GIVE if what > 0.96 and words >= 7 else self.pick(verbs)
            who = self.subject(self.subject_words(words - 1), verb.subjects)
            said = self.doing(who, verb, words - len(who.source))
        return joined(said, invariable(self.pick(tuple(lexicon.LATE_ADVERBS)))) if late else said

    def state(self, words: int) -> Phrase:
        """A clause with an adjective ("she is happy") or a posture verb; its subject must have a definite gender."""
        if self.chance(0.4):
            posture = self.pick(lexicon.POSTURES)
            among = GENDERED if posture.participle and posture.participle.m != posture.participle.f else EVERYONE
            who = self.subject(self.subject_words(words - 1), BEINGS, among)
            return self.posture(who, posture, words - len(who.source))
        adjective = self.pick(lexicon.ADJECTIVES)
        if adjective.kinds & BEINGS and self.chance(0.3):
            same = adjective.m == adjective.f and adjective.m_plural == adjective.f_plural
            who = self.subject(1, BEINGS & adjective.kinds, (*GENDERED, "i", "we") if same else GENDERED)
        else:
            who = self.nouns(max(2, words - 2), adjective.kinds, definite=not adjective.kinds & BEINGS)
        return self.being(who, adjective, words - len(who.source))

    def posture(self, who: Phrase, verb: Verb, words: int) -> Phrase:
        """The given subject with a posture verb and a place."""
        place = self.place(words - 2)
        said = {"negation": "not"} if self.chance(0.15) and words > 4 else {"adverb": self.adverb()}
        return clause(who, verb, place, past=self.chance(0.6), **said)

    def being(self, who: Phrase, adjective: Adjective, words: int) -> Phrase:
        """The given subject with "to be" and an adjective."""
        negation = self.negation() if words >= 3 else ""
        very = words >= 3 and adjective.english not in PLAIN and self.chance(0.25)
        said = predicate(adjective, who, very=very)
        return clause(who, None, said, negation=negation, past=self.chance(0.3))

    def doing(self, who: Phrase, verb: Verb, words: int) -> Phrase:
        """The given subject with a verb and its objects; `words` counts the verb."""
        negation = self.negation() if words >= 4 else ""
        adverb = "" if negation or words < 3 else self.adverb()
        left = words - 1 - (2 if negation == "not" else bool(negation or adverb))
        rest: list[Phrase] = []
        if verb is lexicon.GIVE:
            given = self.nouns(max(2, left // 2), verb.objects, negated=bool(negation))
            to = self.nouns(max(2, left - 1 - len(given.source)), PERSONS, single=True)
            rest = [given, prepositional(verb.preposition, to)]
        elif verb.preposition:
            to = self.nouns(max(2, left - 1), verb.objects, definite=True, single=verb.preposition == "to")
            rest = [prepositional(verb.preposition, to)]
        elif verb.objects:
            tail = left >= 6 and self.chance(0.4)
            rest = [self.object(who, verb, left - 3 if tail else left, bool(negation))]
            if tail:
                rest.append(self.place(left - len(rest[0].source)))
        elif left >= 3:
            rest = [self.place(left)]
        return clause(who, verb, *rest, negation=negation, adverb=adverb)

    def object(self, who: Phrase, verb: Verb, words: int, negated: bool) -> Phrase:
        """The object of a transitive verb: a noun phrase, or a pronoun if the verb takes persons."""
        if verb.objects >= {"person", "animal"} and (words < 2 or self.chance(0.2)):
            others = [english for english, _, person in lexicon.OBJECTS if person != who.person or person in (1, 4)]
            return pronoun_object(self.pick(others))
        if "study" in verb.objects:
            if self.chance(0.35):
                return self.generic(words, verb.objects)
            return self.nouns(max(2, words), verb.objects - {"study"}, definite=True)
        return self.nouns(max(2, words), verb.objects, negated=negated)

    def generic(self, words: int, kinds: frozenset[str]) -> Phrase:
        """A generic noun phrase without determiner in English ("music", "cats")."""
        noun = self.pick(_nouns(kinds))
        adjectives = self.adjectives(noun) if words >= 2 and self.chance(0.5) else []
        return noun_phrase("", noun, plural=not noun.mass, adjectives=adjectives)

    def place(self, words: int, among: tuple[str, ...] = tuple(PLACES)) -> Phrase:
        english = self.pick(among)
        near = english == "near"
        return prepositional(english, self.nouns(max(2, words - 1), PLACES[english], definite=near, single=near))

    def subject(self, words: int, kinds: frozenset[str], among: tuple[str, ...] = EVERYONE) -> Phrase:
        """A subject: one of the pronouns in `among`, or a noun phrase."""
        if words < 2 or (self.chance(0.4) and words < 5):
            return subject(self.pick(among))
        return self.nouns(words, kinds)

    def nouns(
        self,
        words: int,
        kinds: frozenset[str],
        *,
        negated: bool = False,
        definite: bool = False,
        bare: bool = False,
        single: bool = False,
    ) -> Phrase:
        """A noun phrase. Unless `single`, it may be two phrases joined by "and"; unless `bare`, it may have a modifier.

        After "de" and "à" only single phrases are drawn, because French repeats these prepositions.
        """
        if words >= 5 and not (negated or single) and self.chance(0.15):
            # The first phrase has no modifier: "the queens near the man and the boy" would be ambiguous.
            first = self.nouns(2 + self.below(min(3, words - 4)), kinds, definite=definite, bare=True, single=True)
            return both(first, self.nouns(words - 1 - len(first.source), kinds, definite=definite))
        noun = self.pick(_nouns(kinds))
        plural = not noun.mass and self.chance(0.35)
        if definite or self.chance(0.55):
            determiner = self.pick(OWNERS)
        else:
            determiner = self.pick(("two", "three", "a", "a")) if plural else "a"
        adjectives = self.adjectives(noun) if words >= 3 and self.chance(0.6) else []
        found = noun_phrase(determiner, noun, plural=plural, adjectives=adjectives[: words - 2], negated=negated)
        left = words - len(found.source)
        if left >= 3 and not bare and self.chance(0.7):
            # A noun has one modifier only: with two, the agreement of a relative clause would be ambiguous.
            if left >= 4 and self.chance(0.5):
                relative = self.relative(found, noun, left)
                return found if relative is None else joined(found, relative)
            if noun.kinds & OWNED and determiner in ("the", "a") and self.chance(0.6):
                return joined(found, prepositional("of", self.nouns(left - 1, PERSONS, definite=True, single=True)))
            return joined(found, self.place(left, AROUND if "place" in noun.kinds else tuple(PLACES)))
        return found

    def relative(self, found: Phrase, noun: Noun, words: int) -> Phrase | None:
        """The noun phrase with a relative clause; None if no verb or adjective fits the noun."""
        human = "person" in noun.kinds
        verbs = [v for v in lexicon.TRANSITIVE if v.objects & noun.kinds]
        if verbs and self.chance(0.4):
            verb = self.pick(verbs)
            who = self.subject(words - 2, verb.subjects)
            negation = self.negation() if words - len(who.source) >= 4 else ""
            return joined(invariable("that"), clause(who, verb, negation=negation))
        who = relative_subject(found, human)
        if not noun.kinds & BEINGS:
            return self.being(who, self.pick([a for a in lexicon.ADJECTIVES if a.kinds & noun.kinds]), words - 1)
        what = self.random()
        if what < 0.25:
            return self.posture(who, self.pick(lexicon.POSTURES), words - 1)
        verbs = [v for v in (*lexicon.TRANSITIVE, *lexicon.INTRANSITIVE) if v.subjects & noun.kinds]
        return self.doing(who, self.pick(verbs), words - 1)

    def adjectives(self, noun: Noun) -> list[Adjective]:
        """An adjective that fits the noun, and sometimes a second one on the other side of it in French."""
        possible = _adjectives(noun)
        first = self.pick(possible)
        others = [a for a in possible if a.before is not first.before]
        return [first, self.pick(others)] if others and self.chance(0.3) else [first]

    def subject_words(self, words: int) -> int:
        """Draw the number of words of the subject."""
        return 1 + self.below(max(1, words - 2))

    def negation(self) -> str:
        drawn = self.random()
        return "not" if drawn < 0.22 else "never" if drawn < 0.3 else ""

    def adverb(self) -> str:
        return self.pick(tuple(lexicon.ADVERBS)) if self.chance(0.12) else ""


@cache
def _nouns(kinds: frozenset[str]) -> tuple[Noun, ...]:
    return tuple(n for n in lexicon.NOUNS if n.kinds & kinds)


@cache
def _adjectives(noun: Noun) -> tuple[Adjective, ...]:
    return tuple(a for a in lexicon.ADJECTIVES if a.kinds & noun.kinds)
