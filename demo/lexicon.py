"""Words that conversations are about: invented names, cities, titles, ids, times, sums.

A lexicon draws from one side of a split: `training` or held out.
Invented names are built from syllables, and no syllable, listed word or id is on both sides, so a model
that scores well on the held-out side has learned to copy and has not memorised.
"""

from dataclasses import dataclass
from random import Random
from zlib import crc32

ONSETS = "b bl br c ch d dr f fl g gr h j k kr l m n p pl pr qu r s sh sk st t th tr v w y z".split()
VOWELS = "a e i o u ai ea ee ia io oa oo ou".split()
CODAS = "- - - - l m n r s t x nd ng rk rn sh st th".split()

CITIES = """Amsterdam Athens Austin Bangkok Barcelona Beijing Berlin Bogota Boston Brussels Budapest Cairo Chicago
Copenhagen Dallas Delhi Denver Dublin Geneva Hamburg Hanoi Helsinki Houston Istanbul Jakarta Kyoto Lagos Lima London
Lyon Madrid Manila Melbourne Miami Milan Montreal Moscow Munich Nairobi Naples Osaka Oslo Ottawa Paris Prague Rome
Santiago Seattle Seoul Shanghai Singapore Stockholm Sydney Tokyo Toronto Vienna Warsaw Zurich""".split()
CITIES_HELD_OUT = "Accra Bremen Calgary Dakar Florence Glasgow Havana Kigali Lisbon Malaga Nantes Porto Riga Tunis".split()

PEOPLE = """Alice Anna Ben Carla Carlos Clara Daniel David Elena Emma Eric Eva Felix Grace Hannah Henry Ida Ivan Jack
Jane John Julia Karim Kate Laura Leo Lena Lucas Maria Mark Martin Maya Mia Michael Nadia Nina Noah Olga Oliver Omar Paul
Peter Priya Rosa Sam Sara Simon Sofia Thomas Tom Vera Victor Yuki Zoe""".split()
PEOPLE_HELD_OUT = "Amir Bruno Chloe Dora Edgar Fatima Gustav Helga Irene Jonas Kira Lars Mona Nils Petra Rahul".split()

TOPICS = """budget coffee deadline dentist design dinner doctor garden gym invoice kickoff lunch meeting onboarding party
piano planning retro review school standup training travel workshop yoga demo launch interview concert breakfast release
survey board client contract marketing sales""".split()
TOPICS_HELD_OUT = "audit briefing chess haircut hiring jogging lecture museum picnic rehearsal soccer tutoring".split()

PROBLEMS = """printer|laptop|screen|keyboard|mouse|phone|email|calendar|browser|network|scanner|headset|camera|password|
account|badge|router|server|backup|website|payroll|database|license|monitor""".replace("\n", "").split("|")
PROBLEMS_HELD_OUT = "projector tablet microphone firewall wiki speaker charger intranet".split()
SYMPTOMS = """is broken|is slow|does not start|is locked|is offline|shows an error|keeps crashing|is missing|
makes noise|is out of date""".replace("\n", "").split("|")

WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
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

    def syllable(self) -> str:
        while True:
            syllable = self.random.choice(ONSETS) + self.random.choice(VOWELS)
            syllable += self.random.choice(CODAS).replace("-", "")
            if is_held_out(syllable) == self.held_out:
                return syllable

    def invented_word(self) -> str:
        """Mostly syllables; sometimes letters at random, so that no sequence of tokens is strange to the model."""
        while True:
            if self.random.random() < 0.15:
                word = "".join(self.random.choices(LETTERS, k=self.random.randint(3, 8)))
            else:
                word = "".join(self.syllable() for _ in range(self.random.choice((1, 2, 2, 2, 3, 3))))
            if len(word) < 11 and is_held_out(word) == self.held_out:
                return word

    def name(self, real: list[str], real_held_out: list[str]) -> str:
        if self.random.random() < 0.2:
            return self.random.choice(real_held_out if self.held_out else real)
        word = self.invented_word()
        return word if self.random.random() < 0.1 else word.capitalize()

    def city(self) -> str:
        city = self.name(CITIES, CITIES_HELD_OUT)
        if self.random.random() < 0.15:
            city += " " + self.invented_word().capitalize()
        return city

    def person(self) -> str:
        person = self.name(PEOPLE, PEOPLE_HELD_OUT)
        if self.random.random() < 0.35:
            person += " " + self.invented_word().capitalize()
        return person

    def title(self) -> str:
        """A short calendar title such as `budget review` or `lunch with Zorvan`."""
        topics = TOPICS_HELD_OUT if self.held_out else TOPICS
        form = self.random.random()
        if form < 0.3:
            return f"{self.random.choice(topics)} with {self.person()}"
        if form < 0.6:
            return f"{self.invented_word()} {self.random.choice(topics)}"
        return " ".join(self.random.sample(topics, 2)) if form < 0.85 else self.random.choice(topics)

    def problem(self) -> str:
        """A short ticket title such as `printer is offline` or `Zorvan laptop is slow`."""
        problem = self.random.choice(PROBLEMS_HELD_OUT if self.held_out else PROBLEMS)
        if self.random.random() < 0.5:
            problem = f"{self.invented_word()} {problem}"
        return f"{problem} {self.random.choice(SYMPTOMS)}"

    def query(self) -> str:
        problem = self.random.choice(PROBLEMS_HELD_OUT if self.held_out else PROBLEMS)
        return f"{self.invented_word()} {problem}" if self.random.random() < 0.6 else problem

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
        return str(self.random.randint(1, 10 ** self.random.randint(1, 4) - 1))

    def expression(self) -> str:
        gap = " " if self.random.random() < 0.5 else ""
        first, second, third = (f"{gap}{self.random.choice('+-*/')}{gap}{self.operand()}" for _ in range(3))
        form = self.random.random()
        if form < 0.5:
            return self.operand() + first
        if form < 0.75:
            return self.operand() + first + second
        return f"({self.operand()}{first}){second}" + (third if form > 0.9 else "")

    def spoken_expression(self) -> tuple[str, str]:
        """The same sum in words, `12 plus 5`, and in signs, `12 + 5`."""
        left, right = self.operand(), self.operand()
        word = self.random.choice(list(OPERATOR_WORDS))
        return f"{left} {word} {right}", f"{left} {OPERATOR_WORDS[word]} {right}"
