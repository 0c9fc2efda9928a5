"""Sentence pairs for translation, and translating with a trained model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from qkv._untrusted import check_version, load_json
from qkv.errors import InputError, nearest, refusing
from qkv.models import Sampler, checkpoint, generate, load
from qkv_lab import grammar, lexicon
from qkv_lab.grammar import (
    SHORTEST,
    Pair,
    Phrase,
    T,
    both,
    clause,
    finished,
    invariable,
    joined,
    noun_phrase,
    predicate,
    prepositional,
    pronoun_object,
    relative_subject,
    subject,
)
from qkv_lab.lexicon import Adjective, Noun, Verb
from qkv_lab.models import EncoderDecoder, RNNSeq2Seq

__all__ = ["START", "greedy", "sentence", "vocabularies"]
__dir__ = __all__.copy


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


PAD, START, END = 0, 1, 2
SPECIAL = ("<pad>", "<start>", "<end>")
VERSION = 1
"""The version of the vocabulary file; increase it when an older qkv could misread a file that this version writes."""
VOCABULARY = "vocabulary.json"
"""The vocabulary file beside a model: lists of words under ``source`` and ``target``, in the order of their numbers."""


class Vocabulary:
    """Maps words to token numbers and back; the tokens of `SPECIAL` come first.

    >>> Vocabulary(["chat", "le"]).numbers(["le", "chat"])
    [4, 3]
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = (*SPECIAL, *words)
        self._number = {word: i for i, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def numbers(self, words: Sequence[str]) -> list[int]:
        """The token numbers of words; `InputError` for a word that is not in the vocabulary."""
        try:
            return [self._number[word] for word in words]
        except KeyError as error:
            word = error.args[0]
            raise InputError(f"word {word!r} is not in the vocabulary{nearest(word, self.words)}") from None

    def text(self, numbers: Sequence[int]) -> list[str]:
        """The words of token numbers."""
        return [self.words[i] for i in numbers]


def vocabularies() -> tuple[Vocabulary, Vocabulary]:
    """The vocabularies of source and target: all words of the grammar.

    >>> english, french = vocabularies()
    >>> english.text(english.numbers(["the", "cat"]))
    ['the', 'cat']
    """
    source, target = grammar.vocabularies()
    return Vocabulary(source), Vocabulary(target)


class Translation(NamedTuple):
    """A translated sentence with the attention weights of each word."""

    source: list[str]
    target: list[str]
    weights: Float[Tensor, "target source"] | None
    """The weights on the source words with which each target word was predicted: a mean over heads, or None."""


def padded(rows: Sequence[Sequence[int]]) -> Int[Tensor, "rows longest"]:
    """Rows of different lengths as one tensor, padded at the end with `PAD`."""
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=PAD)


@torch.no_grad()
def greedy(model: nn.Module, source: Int[Tensor, "b s"], longest: int) -> list[list[int]]:
    """Greedy decoding until the end token or `longest` words."""
    if not isinstance(model, RNNSeq2Seq | EncoderDecoder):
        raise InputError(f"model is {type(model).__name__}, expected RNNSeq2Seq or EncoderDecoder")
    begin = source.new_full((len(source), 1), START)
    return generate(
        model, model.start(source), begin, max_new_tokens=longest, sampling=Sampler(temperature=0), end=END
    )  # fmt: skip


@torch.no_grad()
def cross_weights(
    model: nn.Module, source: Int[Tensor, "b s"], target: Int[Tensor, "b t"]
) -> Float[Tensor, "layer head b t s"] | None:
    """Cross-attention weights: row t has the weights with which target token t + 1 is predicted; padding has 0.

    A recurrent model has one layer, and one head unless its attention has several. None if the model has no attention.
    """
    if isinstance(model, RNNSeq2Seq):
        if model.attention is None:
            return None
        return model.alignments(source, target, per_head=True).transpose(0, 1)[None].cpu()
    from qkv.profiler.run import profile

    found = profile(model, {"source": source, "target": target}, progress=False, probe=False).group("cross")["weights"]
    return torch.from_numpy(found.transpose("layer", "head", "text", "query", "key").values).nan_to_num()


def translate(
    model: nn.Module | str | Path, text: str, vocabulary: tuple[Vocabulary, Vocabulary] | None = None
) -> Translation:
    """Translate a sentence.

    Args:
        model: a model of the task `translation`, the folder that it was saved in, or ``"qkv-translation"``.
        text: words separated by spaces; case and final punctuation are ignored.
        vocabulary: the vocabularies of source and target; read from the folder if None.

    Raises:
        InputError: if a word is not in the vocabulary, or the text has no words.

    >>> " ".join(translate("qkv-translation", "the black cat").target)
    'le chat noir'
    """
    if not isinstance(model, nn.Module):
        folder = checkpoint.folder_of(str(model)) or Path(model)
        vocabulary = vocabulary or read_vocabulary(folder)
        model = load(folder)
    if vocabulary is None:
        raise InputError("vocabulary is None, expected those of source and target if model is not a folder")
    words = text.lower().strip().rstrip(".!").split()
    if not words:
        raise InputError(f"text is {text!r}, expected at least one word")
    device = next(model.parameters()).device
    source = torch.tensor([vocabulary[0].numbers(words)], device=device)
    [found] = greedy(model, source, 2 * len(words) + 10)
    weights = cross_weights(model, source, torch.tensor([[START, *found]], device=device)) if found else None
    seen = None if weights is None else weights.mean((0, 1))[0, : len(found)]
    return Translation(words, vocabulary[1].text(found), seen)


def read_vocabulary(folder: Path) -> tuple[Vocabulary, Vocabulary]:
    """The vocabularies of source and target in a model's folder, from the file of `vocabulary_file`."""
    file = folder / VOCABULARY
    with (
        refusing(f"model: no {VOCABULARY} in {folder} ({{}})", OSError),
        refusing(f"model: the file {file} is not a vocabulary ({{}})", ValueError, TypeError, KeyError, AttributeError),
    ):
        found = load_json(file)
        check_version(found, VERSION)
        source, target = (Vocabulary(_words(found[half])) for half in ("source", "target"))
        return source, target


def _words(found: Any) -> list[str]:
    """The words after the special tokens; raises ValueError unless they are different strings."""
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise ValueError("it is not a list of words")
    if tuple(found[: len(SPECIAL)]) != SPECIAL or len(set(found)) != len(found):
        raise ValueError(f"it does not begin with {', '.join(SPECIAL)}, or has a word twice")
    return found[len(SPECIAL) :]


def vocabulary_file(source: Vocabulary, target: Vocabulary) -> str:
    """The text of the vocabulary file that `read_vocabulary` reads."""
    found = {"format_version": VERSION, "source": source.words, "target": target.words}
    return json.dumps(found, ensure_ascii=False, indent=0) + "\n"
