"""The hand-written lexicon of the English–French grammar: all word forms, and which words may be combined."""

from __future__ import annotations

from typing import Literal, NamedTuple

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


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().splitlines()]


def _adjective(row: list[str]) -> Adjective:
    english, m, f, m_plural, f_plural, m_vowel, side, rank, *kinds = row
    m_vowel = m if m_vowel == "-" else m_vowel
    return Adjective(english, m, f, m_plural, f_plural, m_vowel, side == "before", int(rank), _kinds(kinds))


def _kinds(words: list[str]) -> frozenset[str]:
    return frozenset(words)


NOUNS = tuple(
    Noun(row[0], row[1].replace("-", ""), row[2], row[3].replace("-", ""), row[4], _kinds(row[5:]))  # type: ignore[arg-type]
    for row in _rows("""
        man men homme hommes m person
        woman women femme femmes f person
        boy boys garçon garçons m person
        girl girls fille filles f person
        child children enfant enfants m person
        friend friends ami amis m person
        teacher teachers professeur professeurs m person
        student students étudiant étudiants m person
        hero heroes héros héros m person
        queen queens reine reines f person
        actress actresses actrice actrices f person
        cat cats chat chats m animal
        dog dogs chien chiens m animal
        horse horses cheval chevaux m animal
        bird birds oiseau oiseaux m animal
        mouse mice souris souris f animal
        owl owls hibou hiboux m animal
        cow cows vache vaches f animal
        bee bees abeille abeilles f animal
        apple apples pomme pommes f food
        orange oranges orange oranges f food
        cake cakes gâteau gâteaux m food
        egg eggs œuf œufs m food
        bean beans haricot haricots m food
        bread - pain - m food
        cheese - fromage - m food
        water - eau - f drink
        milk - lait - m drink
        learning - apprentissage - m study
        music - musique - f study
        book books livre livres m thing text
        letter letters lettre lettres f thing text
        newspaper newspapers journal journaux m thing text
        story stories histoire histoires f text
        table tables table tables f thing flat
        chair chairs chaise chaises f thing flat
        mat mats tapis tapis m thing flat
        car cars voiture voitures f thing
        hat hats chapeau chapeaux m thing
        boat boats bateau bateaux m thing
        clock clocks horloge horloges f thing
        tree trees arbre arbres m tree
        house houses maison maisons f place
        garden gardens jardin jardins m place
        forest forests forêt forêts f place
        school schools école écoles f place goal
        church churches église églises f place goal
        hotel hotels hôtel hôtels m place goal
        hospital hospitals hôpital hôpitaux m place goal
        market markets marché marchés m place goal
    """)
)
ASPIRATED = frozenset({"héros", "hibou", "hiboux", "haricot", "haricots"})
"""Words with an aspirated h, before which there is no elision."""

ADJECTIVES = tuple(
    _adjective(row)
    for row in _rows("""
        beautiful beau belle beaux belles bel before 0 person animal thing place tree
        pretty joli jolie jolis jolies - before 0 animal thing place
        good bon bonne bons bonnes - before 0 food drink text
        bad mauvais mauvaise mauvais mauvaises - before 0 food drink text
        big grand grande grands grandes - before 1 animal thing place tree
        small petit petite petits petites - before 1 person animal thing place tree
        fat gros grosse gros grosses - before 1 animal
        old vieux vieille vieux vieilles vieil before 2 person animal thing place text tree
        young jeune jeune jeunes jeunes - before 2 person animal tree
        new nouveau nouvelle nouveaux nouvelles nouvel before 2 person thing place text
        happy heureux heureuse heureux heureuses - after 0 person animal
        sad triste triste tristes tristes - after 0 person animal text
        tired fatigué fatiguée fatigués fatiguées - after 0 person animal
        intelligent intelligent intelligente intelligents intelligentes - after 0 person animal
        strange étrange étrange étranges étranges - after 0 person animal thing place text tree food
        famous célèbre célèbre célèbres célèbres - after 0 person text place
        expensive cher chère chers chères - after 0 thing food
        dangerous dangereux dangereuse dangereux dangereuses - after 0 animal place
        deep profond profonde profonds profondes - after 1 study
        heavy lourd lourde lourds lourdes - after 1 thing
        black noir noire noirs noires - after 3 animal thing
        white blanc blanche blancs blanches - after 3 animal thing
        red rouge rouge rouges rouges - after 3 thing
        green vert verte verts vertes - after 3 thing tree
        blue bleu bleue bleus bleues - after 3 thing
        brown marron marron marron marron - after 3 animal thing
        french français française français françaises - after 4 person food text
        italian italien italienne italiens italiennes - after 4 person food text
    """)
)

DETERMINERS = tuple(
    Determiner(*(x.replace("-", "") for x in row))
    for row in _rows("""
        the the le la le la les
        a some un une un une des
        this these ce cette cet cette ces
        that those ce cette cet cette ces
        my my mon ma mon mon mes
        his his son sa son son ses
        her her son sa son son ses
        our our notre notre notre notre nos
        your your votre votre votre votre vos
        their their leur leur leur leur leurs
        - two - - - - deux
        - three - - - - trois
    """)
)

BEING = ("person", "animal")
SEEN = ("person", "animal", "thing", "place", "text", "tree")
TRANSITIVE = tuple(
    Verb(row[0], row[1], tuple(row[2:7]), _kinds(row[7].split("+")), _kinds(row[8:]))
    for row in _rows(f"""
        love loves aime aime aimons aimez aiment person+animal {" ".join(SEEN)} food drink study
        hate hates déteste déteste détestons détestez détestent person+animal {" ".join(SEEN)} food drink study
        eat eats mange mange mangeons mangez mangent person+animal food
        drink drinks bois boit buvons buvez boivent person+animal drink
        see sees vois voit voyons voyez voient person+animal {" ".join(SEEN)}
        hear hears entends entend entendons entendez entendent person+animal person animal
        watch watches regarde regarde regardons regardez regardent person+animal person animal thing tree
        follow follows suis suit suivons suivez suivent person+animal person animal
        know knows connais connaît connaissons connaissez connaissent person person place text
        find finds trouve trouve trouvons trouvez trouvent person+animal person animal thing food
        read reads lis lit lisons lisez lisent person text
        write writes écris écrit écrivons écrivez écrivent person text
        buy buys achète achète achetons achetez achètent person thing food text
        sell sells vends vend vendons vendez vendent person thing food animal
        have has ai a avons avez ont person thing animal food
        want wants veux veut voulons voulez veulent person thing animal food drink
    """)
)
PREPOSITIONAL = tuple(
    Verb(row[0], row[1], tuple(row[2:7]), _kinds(row[7].split("+")), _kinds(row[9:]), row[8])
    for row in _rows("""
        speak speaks parle parle parlons parlez parlent person to person animal
        play plays joue joue jouons jouez jouent person+animal with person animal
        live lives habite habite habitons habitez habitent person in place
        go goes vais va allons allez vont person to goal
    """)
)
INTRANSITIVE = tuple(
    Verb(row[0], row[1], tuple(row[2:7]), _kinds(row[7].split("+")))
    for row in _rows("""
        sleep sleeps dors dort dormons dormez dorment person+animal
        run runs cours court courons courez courent person+animal
        sing sings chante chante chantons chantez chantent person
        work works travaille travaille travaillons travaillez travaillent person
        dance dances danse danse dansons dansez dansent person
    """)
)
GIVE = Verb(
    "give", "gives", ("donne", "donne", "donnons", "donnez", "donnent"), _kinds(["person"]), _kinds(["thing", "food"]),
    "to",
)  # fmt: skip
REPORTING = (
    Verb("think", "thinks", ("pense", "pense", "pensons", "pensez", "pensent"), _kinds(["person"])),
    Verb("say", "says", ("dis", "dit", "disons", "dites", "disent"), _kinds(["person"])),
    Verb("believe", "believes", ("crois", "croit", "croyons", "croyez", "croient"), _kinds(["person"])),
)
ETRE, ETRE_PAST = ("suis", "est", "sommes", "êtes", "sont"), ("étais", "était", "étions", "étiez", "étaient")
BE, BE_PAST = ("am", "is", "are", "are", "are"), ("was", "was", "were", "were", "were")
POSTURES = tuple(
    Verb(row[0], row[1], ETRE, _kinds(["person", "animal"]), english_past=row[2],
         participle=_adjective([row[0], *row[3:], "-", "after", "0"]))
    for row in _rows("""
        sit sits sat assis assise assis assises
        lie lies lay couché couchée couchés couchées
        stand stands stood debout debout debout debout
    """)
)  # fmt: skip

SUBJECTS = (("i", "je", 0, "m"), ("he", "il", 1, "m"), ("she", "elle", 1, "f"), ("we", "nous", 2, "m"),
            ("you", "vous", 3, "m"), ("they", "ils", 4, "m"))  # fmt: skip
"""Subject pronouns: English, French, person (0 … 4, the index of the verb form), gender."""
OBJECTS = (("me", "me", 0), ("him", "le", 1), ("her", "la", 1), ("us", "nous", 2), ("you", "vous", 3),
           ("them", "les", 4))  # fmt: skip
"""Object pronouns, which precede the verb in French: English, French, person."""
PREPOSITIONS = {
    "on": ("sur",), "under": ("sous",), "in": ("dans",), "with": ("avec",), "behind": ("derrière",),
    "near": ("près", "de"), "of": ("de",), "to": ("à",),
}  # fmt: skip
CONJUNCTIONS = {
    "and": ("et",), "but": ("mais",), "because": ("parce", "que"), "when": ("quand",), "while": ("pendant", "que"),
}  # fmt: skip
ADVERBS = {"often": "souvent", "always": "toujours", "sometimes": "parfois"}
"""Adverbs that precede the verb in English and follow it in French."""
LATE_ADVERBS = {"today": "aujourd'hui", "here": "ici"}
"""Adverbs at the end of a clause."""
