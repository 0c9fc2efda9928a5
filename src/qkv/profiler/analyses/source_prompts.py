"""Generated prompts whose answer is in a known passage, or in none, to find the heads that read passages.

The facts are invented, so that no model knows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

NAMES = (
    ("Alice Brian Clara David Emma Frank", "Baker Carter Hughes Morris Palmer Walsh"),
    ("Lucía Mateo Sofía Diego Elena Javier", "García Ramírez Ortega Núñez Vidal"),
    ("Jürgen Käthe Lukas Greta Moritz Ulrike", "Müller Schäfer Vogel Krüger Lehmann"),
    ("Agnieszka Bartosz Katarzyna Wojciech", "Kowalska Nowak Wójcik Mazur"),
    ("Haruto Sakura Kenji Aiko", "Tanaka Suzuki Watanabe Mori"),
    ("Adebayo Ngozi Chidi Folake", "Okafor Adeyemi Balogun Eze"),
    ("Анна Иван Ольга Мария", "Иваненко Петренко Коваль Мороз"),
)
"""First and last names in seven languages."""
WORDS = {
    "city": "Lisbon,Oslo,Nairobi,Quito,Kraków,Hanoi,Denver,Perth,Lyon,Osaka,Bergen,Tunis,Malmö,Riga,Accra,Bogotá",
    "job": "nurse,baker,pilot,lawyer,gardener,plumber,teacher,chemist,tailor,librarian,carpenter,dentist",
    "thing": "bicycle,telescope,violin,umbrella,passport,camera,suitcase,painting,kayak,typewriter",
    "firm": "Nordwind,Bluefin,Aldera,Tessaly,Kinetra,Ferrox,Lumina,Osprey,Quanta,Redwood,Vantor,Westline",
    "goods": "pumps,lamps,tractors,keyboards,sofas,engines,tents,boats",
    "month": "January,February,March,April,May,June,July,August,September,October,November,December",
    "place": "attic,cellar,garage,library,kitchen,greenhouse,safe,guest room,workshop,barn,boathouse,hall",
    "event": "book fair,jazz festival,chess tournament,boat race,film week,wine market,marathon",
    "field": "physics,history,law,medicine,music,geology,economics,botany",
    "allergy": "peanuts,cat hair,pollen,shellfish,latex,milk,dust,wasps,strawberries,wheat,eggs,soap",
}
FILLERS = (
    "The weather was mild for the season.", "Several neighbours were told about it last week.",
    "The report was printed on both sides of the paper.", "A short note was added later.",
    "The details were checked twice.", "Most of the work was finished before noon.",
    "It was a quiet week for everybody.", "The old list is no longer in use.",
    "The next meeting has not been planned yet.", "Some of the chairs had to be repaired.",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of fact: a sentence, a question about it and its answer, with {subject}, {value} and other words."""

    sentence: str
    question: str
    answer: str
    subject: str = "name"
    value: str = "number"


KINDS = (
    Kind("{subject}'s {thing} is kept in the {value}.", "Where is {subject}'s {thing} kept?",
         "{subject}'s {thing} is kept in the {value}.", value="place"),
    Kind("{subject} was born in {value} in {city} and works as a {job}.", "When was {subject} born?",
         "{subject} was born in {value}.", value="year"),
    Kind("The code of {subject} is {value}.", "What is the code of {subject}?", "The code of {subject} is {value}."),
    Kind("Last year {subject} sold {value} {goods}.", "How many {goods} did {subject} sell last year?",
         "{subject} sold {value} {goods}.", subject="firm"),
    Kind("The {subject} in {city} begins on {value}.", "When does the {subject} in {city} begin?",
         "The {subject} in {city} begins on {value}.", subject="event", value="date"),
    Kind("{subject}, who lives in {city}, works as a {value}.", "What does {subject} do for a living?",
         "{subject} works as a {value}.", value="job"),
)  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """Passages, a question and its answer, and which passage holds it; None if none does."""

    passages: list[str]
    question: str
    answer: str
    value: str
    holds: int | None


def prompt(
    random: Random, n: int, *, answered: bool = True, kinds: tuple[Kind, ...] = KINDS, fillers: int = 2
) -> Prompt:
    """A prompt of `n` passages, each with a fact and up to `fillers` other sentences.

    In half of the prompts all facts are of one kind, so that passages differ in names and values only.

    >>> found = prompt(Random(0), 3)
    >>> len(found.passages), found.value in found.passages[found.holds or 0]
    (3, True)
    """
    kind, same, holds = random.choice(kinds), random.random() < 0.5, random.randrange(n)
    fact = _words(random, kind)
    passages = []
    for at in range(n):
        one, words = kind, fact
        if at != holds or not answered:
            one = kind if same else random.choice(kinds)
            words = _words(random, one)
            while words["subject"] == fact["subject"] or words["value"] == fact["value"]:
                words = _words(random, one)
        sentences = random.sample(FILLERS, random.randint(0, min(fillers, len(FILLERS))))
        sentences.insert(random.randint(0, len(sentences)), one.sentence.format_map(words))
        passages.append(" ".join(sentences))
    question, answer = kind.question.format_map(fact), kind.answer.format_map(fact)
    return Prompt(passages, question, answer, fact["value"], holds if answered else None)


def _words(random: Random, kind: Kind) -> dict[str, str]:
    words = {name: random.choice(these.split(",")) for name, these in WORDS.items()}
    for name in ("name", "other"):
        first, last = random.choice((NAMES[0], NAMES[0], *NAMES))  # English more often
        words[name] = f"{random.choice(first.split())} {random.choice(last.split())}"
    words["number"], words["year"] = str(random.randint(1000, 9999)), str(random.randint(1940, 2005))
    words["date"] = f"{random.randint(2, 28)} {words['month']}"
    words["time"] = f"{random.randint(5, 22)}:{random.randint(10, 59)}"
    return words | {"subject": words[kind.subject], "value": words[kind.value]}
