"""Words that conversations are about: invented names, cities, titles, ids, times, sums.

A lexicon draws from one side of a split: `training` or held out.
Invented names are built from syllables, and no syllable, listed word or id is on both sides, so a model
that scores well on the held-out side has learned to copy and has not memorised.
"""

import re
from dataclasses import dataclass
from random import Random
from zlib import crc32

from graftwork.demo.phrases import REQUESTS, SMALL_TALK
from graftwork.demo.voices import VOICES


def listed(text: str, between: str | None = None) -> list[str]:
    """Words as a line of text, which reads better than a column of quotes."""
    return text.replace("\n", "").split(between) if between else text.split()


ONSETS = listed("b bl br c ch d dr f fl g gr h j k kr l m n p pl pr qu r s sh sk st t th tr v w y z")
VOWELS = listed("a e i o u ai ea ee ia io oa oo ou")
CODAS = listed("- - - - l m n r s t x nd ng rk rn sh st th")

CITIES = listed("""Amsterdam Athens Austin Bangkok Barcelona Beijing Berlin Bogota Boston Brussels Budapest Cairo Chicago
Copenhagen Dallas Delhi Denver Dublin Geneva Hamburg Hanoi Helsinki Houston Istanbul Jakarta Kyoto Lagos Lima London
Lyon Madrid Manila Melbourne Miami Milan Montreal Moscow Munich Nairobi Naples Osaka Oslo Ottawa Paris Prague Rome
Santiago Seattle Seoul Shanghai Singapore Stockholm Sydney Tokyo Toronto Vienna Warsaw Zurich""")
CITIES_HELD_OUT = listed(
    "Accra Bremen Calgary Dakar Florence Glasgow Havana Kigali Lisbon Malaga Nantes Porto Riga Tunis"
)

PEOPLE = listed("""Alice Anna Ben Carla Carlos Clara Daniel David Elena Emma Eric Eva Felix Grace Hannah Henry Ida Ivan Jack
Jane John Julia Karim Kate Laura Leo Lena Lucas Maria Mark Martin Maya Mia Michael Nadia Nina Noah Olga Oliver Omar Paul
Peter Priya Rosa Sam Sara Simon Sofia Thomas Tom Vera Victor Yuki Zoe""")
PEOPLE_HELD_OUT = listed("Amir Bruno Chloe Dora Edgar Fatima Gustav Helga Irene Jonas Kira Lars Mona Nils Petra Rahul")

TOPICS = listed("""budget coffee deadline dentist design dinner doctor garden gym invoice kickoff lunch meeting onboarding party
piano planning retro review school standup training travel workshop yoga demo launch interview concert breakfast release
survey board client contract marketing sales""")
TOPICS_HELD_OUT = listed("audit briefing chess haircut hiring jogging lecture museum picnic rehearsal soccer tutoring")

PROBLEMS = listed(
    """printer|laptop|screen|keyboard|mouse|phone|email|calendar|browser|network|scanner|headset|camera|password|
account|badge|router|server|backup|website|payroll|database|license|monitor""",
    "|",
)
PROBLEMS_HELD_OUT = listed("projector tablet microphone firewall wiki speaker charger intranet")
SYMPTOMS = listed(
    """is broken|is slow|does not start|is locked|is offline|shows an error|keeps crashing|is missing|
makes noise|is out of date""",
    "|",
)

COMMON = listed(
    """about above across action advice after again agree allow amount animal answer apple around artist August autumn
bakery balance battle beauty before begin better bottle bridge bright brother camera candle careful castle chance change
charge cheese choice circle clever coast colour common copper corner cotton country course create crisis custom damage
danger decide degree desert detail device dinner direct doctor double dragon driver during eagle early earth effect
eight either energy engine enough escape evening example expert fabric factor family father fellow figure finger flower
forest fresh friend future garlic gentle giant glass golden ground growth handle happy harbour health heart heavy height
history honest hotel house hungry image income indeed insect inside island jacket journey judge jungle kettle kitchen
knife ladder lantern leader leather legend length letter light liquid listen little magic market matter measure mellow
memory mirror modern moment monkey morning mother mountain muscle nation nature needle nephew night normal notice number
object ocean office orange origin oxygen packet palace pepper person picture planet pocket police praise pretty prison
public purple puzzle quality quarter question quick quiet rabbit random reason record remote rescue result reward rhythm
ribbon river rocket rough sailor salmon sample scheme school season second secret shadow shoulder signal silver simple
single sister slight smooth source special spirit spread square stable stream strength strong structure sudden sugar
summer supper surface switch symbol system talent target teacher temple theory thick thought thunder ticket timber tissue
tomato tongue tower travel treasure triangle trouble tunnel twelve twenty unique until upper useful valley vessel victory
village violin vision volume wagon wander water wealth weight welcome whistle window winter wisdom wonder wooden writer
yellow yesterday young zebra"""
)

# The words of the templates: their tokens must be known as parts of names too.
SCRIPT = sorted(set(re.findall("[a-z]{3,}", repr((REQUESTS, SMALL_TALK, VOICES)).lower())))
HELD_OUT = {word.lower() for word in [*CITIES_HELD_OUT, *PEOPLE_HELD_OUT, *TOPICS_HELD_OUT, *PROBLEMS_HELD_OUT]}

WEEKDAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
OPERATOR_WORDS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}


def is_held_out(word: str) -> bool:
    """A stable tenth of all strings belongs to the held-out side."""
    return crc32(word.lower().encode()) % 10 == 0


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Draws words with `random` from one side of the split."""

    random: Random
    held_out: bool = False
    practice: bool = False
    """Draw more often what is hard: spans whose end nothing but the sentence around them tells."""

    def syllable(self) -> str:
        while True:
            syllable = self.random.choice(ONSETS) + self.random.choice(VOWELS)
            syllable += self.random.choice(CODAS).replace("-", "")
            if is_held_out(syllable) == self.held_out:
                return syllable

    def invented_word(self) -> str:
        """Syllables, letters at random, or pieces of words, so that no sequence of tokens is strange to the model."""
        while True:
            die = self.random.random()
            if die < 0.15:
                word = "".join(self.random.choices(LETTERS, k=self.random.randint(3, 8)))
            elif die < 0.45 and not self.held_out:
                word = self.pieced_word()
            else:
                word = "".join(self.syllable() for _ in range(self.random.choice((1, 2, 2, 2, 3, 3))))
            if 1 < len(word) < 11 and is_held_out(word) == self.held_out and word not in HELD_OUT:
                return word

    def pieced_word(self) -> str:
        """The head of one word and the tail of another."""
        lists = (COMMON, SCRIPT, TOPICS, PROBLEMS, CITIES, PEOPLE)
        words: list[str] = [self.random.choice(self.random.choice(lists)) for _ in range(2)]
        head, tail = (word.lower() for word in words)
        return head[: self.random.randint(0, len(head))] + tail[self.random.randint(0, len(tail)) :]

    def topic(self) -> str:
        if self.held_out:
            return self.random.choice(TOPICS_HELD_OUT)
        die = self.random.random()
        return self.invented_word() if die < 0.4 else self.random.choice(TOPICS if die < 0.7 else COMMON)

    def faulty_thing(self) -> str:
        if self.held_out:
            return self.random.choice(PROBLEMS_HELD_OUT)
        return self.random.choice(PROBLEMS) if self.random.random() < 0.5 else self.topic()

    def name(self, real: list[str], real_held_out: list[str]) -> str:
        if self.random.random() < 0.2:
            return self.random.choice(real_held_out if self.held_out else real)
        word = self.invented_word()
        return word if self.random.random() < 0.1 else word.capitalize()

    def city(self) -> str:
        city = self.name(CITIES, CITIES_HELD_OUT)
        if self.random.random() < (0.4 if self.practice else 0.15):
            city += " " + self.invented_word().capitalize()
        return city

    def person(self) -> str:
        person = self.name(PEOPLE, PEOPLE_HELD_OUT)
        if self.random.random() < (0.5 if self.practice else 0.35):
            person += " " + self.invented_word().capitalize()
        return person

    def title(self) -> str:
        """A short calendar title such as `budget review` or `lunch with Zorvan`."""
        if self.practice and self.random.random() < 0.3:
            return self.topic()
        form = self.random.random()
        if form < 0.3:
            return f"{self.topic()} with {self.person()}"
        if form < 0.6:
            return f"{self.invented_word()} {self.topic()}"
        return f"{self.topic()} {self.topic()}" if form < 0.85 else self.topic()

    def problem(self) -> str:
        """A short ticket title such as `printer is offline` or `Zorvan laptop is slow`."""
        thing = self.faulty_thing()
        if self.random.random() < 0.5:
            thing = f"{self.invented_word()} {thing}"
        return f"{thing} {self.random.choice(SYMPTOMS)}"

    def query(self) -> str:
        thing = self.faulty_thing()
        return f"{self.invented_word()} {thing}" if self.random.random() < 0.6 else thing

    def reference(self) -> str:
        """An order or ticket id: letters, mostly a dash, and digits, such as `QX-4821`."""
        while True:
            letters = "".join(self.random.choices(LETTERS.upper(), k=self.random.randint(1, 3)))
            dash = "-" if self.random.random() < 0.8 else ""
            reference = f"{letters}{dash}{self.digits(self.random.randint(3, 6))}"
            if is_held_out(reference) == self.held_out:
                return reference

    def digits(self, count: int) -> str:
        return "".join(self.random.choices("0123456789", k=count))

    def phone(self) -> str:
        return f"{self.digits(3)}-{self.digits(4)}"

    def clock_time(self) -> str:
        return f"{self.random.randrange(24):02d}:{self.random.randrange(60):02d}"

    def meeting_time(self) -> str:
        return f"{self.random.randrange(7, 21):02d}:{self.random.choice(('00', '15', '30', '45'))}"

    def amount(self) -> float:
        """A quantity to convert; a whole number is an int, so that JSON shows it as the user wrote it."""
        whole = self.random.randint(1, 10 ** self.random.randint(1, 4))
        return whole + 0.5 if self.random.random() < 0.2 else whole

    def operand(self) -> str:
        return str(self.random.randint(1, 10 ** self.random.randint(1, 3) - 1))

    def expression(self) -> str:
        gap = " " if self.random.random() < 0.5 else ""
        first, second = (f"{gap}{self.random.choice('+-*/')}{gap}{self.operand()}" for _ in range(2))
        form = self.random.random()
        if form < 0.7:
            return self.operand() + first
        return self.operand() + first + second if form < 0.85 else f"({self.operand()}{first}){second}"

    def spoken_expression(self) -> tuple[str, str]:
        """The same sum in words, `12 plus 5`, and in signs, `12 + 5`."""
        left, right = self.operand(), self.operand()
        word = self.random.choice(list(OPERATOR_WORDS))
        return f"{left} {word} {right}", f"{left} {OPERATOR_WORDS[word]} {right}"
