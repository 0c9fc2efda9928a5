"""The hand-written lexicon of the English–French grammar, in `lexicon.toml`: word forms, and which may be combined."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, NamedTuple

Gender = Literal["m", "f"]


class Noun(NamedTuple):
    """A noun in both languages. A noun without an English plural is a mass noun."""

    english: str
    english_plural: str
    french: str
    french_plural: str
    gender: Gender
    kinds: frozenset[str]
    """Its semantic classes: person, animal, food, thing, …"""

    @property
    def mass(self) -> bool:
        """True for mass nouns, such as "water"."""
        return not self.english_plural


class Adjective(NamedTuple):
    """An adjective with its four French forms, and a fifth before a masculine singular that begins with a vowel."""

    english: str
    m: str
    f: str
    m_plural: str
    f_plural: str
    m_vowel: str
    before: bool
    """True if it precedes its noun in French."""
    rank: int
    """Its rank in the order of English adjectives: 0 opinion, 1 size, 2 age, 3 colour, 4 origin."""
    kinds: frozenset[str]

    def agree(self, gender: Gender, plural: bool) -> str:
        """The form for a gender and number."""
        return (self.m_plural if gender == "m" else self.f_plural) if plural else self.m if gender == "m" else self.f


class Verb(NamedTuple):
    """A verb in the present tense, with the French forms for je, il, nous, vous, ils.

    Posture verbs ("sit", être assis) use être as the finite verb and a participle that agrees; they also have a past.
    """

    english: str
    english_third: str
    french: tuple[str, ...]
    subjects: frozenset[str]
    objects: frozenset[str] = frozenset()
    preposition: str = ""
    """The English preposition between verb and object, if any."""
    english_past: str = ""
    participle: Adjective | None = None


class Determiner(NamedTuple):
    """A determiner with its French forms; the English singular or plural is empty if there is none."""

    english: str
    english_plural: str
    m: str
    f: str
    m_vowel: str
    f_vowel: str
    plural: str


def _noun(english: str, english_plural: str, french: str, french_plural: str, gender: Gender, *kinds: str) -> Noun:
    return Noun(english, english_plural, french, french_plural, gender, frozenset(kinds))


def _adjective(
    english: str, m: str, f: str, m_plural: str, f_plural: str, m_vowel: str, side: str, rank: str, *kinds: str
) -> Adjective:
    return Adjective(
        english, m, f, m_plural, f_plural, m_vowel or m, side == "before", int(rank), frozenset(kinds)
    )  # fmt: skip


def _verb(english: str, third: str, *row: str) -> Verb:
    french, (subjects, preposition, *objects) = row[:5], row[5:]
    return Verb(english, third, french, frozenset(subjects.split("+")), frozenset(objects), preposition)


def _posture(english: str, third: str, past: str, *forms: str) -> Verb:
    participle = _adjective(english, *forms, "", "after", "0")
    return Verb(english, third, ETRE, frozenset(BEING), english_past=past, participle=participle)


def _rows(name: str, made: Any) -> tuple[Any, ...]:
    return tuple(made(*("" if x == "-" else x for x in row.split())) for row in _LEXICON[name])


_LEXICON = tomllib.loads(Path(__file__).with_name("lexicon.toml").read_text(encoding="utf-8"))
BEING = ("person", "animal")
SEEN = (*BEING, "thing", "place", "text", "tree")
BE, BE_PAST, ETRE, ETRE_PAST = (tuple(_LEXICON[x]) for x in ("be", "be_past", "etre", "etre_past"))
NOUNS: tuple[Noun, ...] = _rows("nouns", _noun)
ASPIRATED = frozenset(_LEXICON["aspirated"])
"""Words with an aspirated h, before which there is no elision."""
ADJECTIVES: tuple[Adjective, ...] = _rows("adjectives", _adjective)
DETERMINERS: tuple[Determiner, ...] = _rows("determiners", Determiner)
TRANSITIVE, PREPOSITIONAL, INTRANSITIVE, (GIVE,), REPORTING = (
    _rows(x, _verb) for x in ("transitive", "prepositional", "intransitive", "giving", "reporting")
)
POSTURES: tuple[Verb, ...] = _rows("postures", _posture)
SUBJECTS: tuple[tuple[str, str, int, Gender], ...] = tuple(tuple(row) for row in _LEXICON["subjects"])
"""Subject pronouns: English, French, person (0 … 4, the index of the verb form), gender."""
OBJECTS: tuple[tuple[str, str, int], ...] = tuple(tuple(row) for row in _LEXICON["objects"])
"""Object pronouns, which precede the verb in French: English, French, person."""
PREPOSITIONS: dict[str, list[str]] = _LEXICON["prepositions"]
CONJUNCTIONS: dict[str, list[str]] = _LEXICON["conjunctions"]
ADVERBS: dict[str, str] = _LEXICON["adverbs"]
"""Adverbs that precede the verb in English and follow it in French."""
LATE_ADVERBS: dict[str, str] = _LEXICON["late_adverbs"]
"""Adverbs at the end of a clause."""
