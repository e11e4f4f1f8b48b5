"""The facts that a user can tell, and the ways to tell, ask for and answer them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from values import CODE_NOUNS, PET_KINDS, code, pick

Fields = dict[str, str]


@dataclass(frozen=True)
class Fact:
    """Phrases about one fact; `{v}` is its value, `{k}` its kind and `{a}` its article."""

    key: str
    tells: tuple[str, ...]
    acks: tuple[str, ...]
    updates: tuple[str, ...]
    asks: tuple[str, ...]
    answer: str
    missing: str
    invent: float = 0.0
    pool: str = ""

    def draw(self, rng: random.Random, split: str) -> Fields:
        """Draw a value of this fact."""
        if self.key == "code":
            return {"v": code(rng, split), "k": rng.choice(CODE_NOUNS)}
        if self.key == "age":
            return {"v": str(rng.randint(8, 99))}
        pool = self.pool or self.key
        if self.key == "pet" and rng.random() < 0.3:
            pool = "name"
        value = pick(rng, split, pool, self.invent)
        fields = {"v": value, "a": "an" if value[0].lower() in "aeiou" else "a"}
        if self.key == "pet":
            fields["k"] = rng.choice(PET_KINDS)
        return fields


NAME = Fact(
    key="name",
    tells=(
        "my name is {v}",
        "my name is {v}",
        "I am {v}",
        "I am called {v}",
        "you can call me {v}",
        "I'm {v}",
        "people call me {v}",
        "this is {v}",
        "my first name is {v}",
        "my name's {v}",
    ),
    acks=("Nice to meet you, {v}!",),
    updates=("please call me {v} from now on", "my name is really {v}"),
    asks=(
        "What is my name?",
        "Do you remember my name?",
        "What am I called?",
        "Who am I?",
        "Can you tell me my name?",
        "Do you know what my name is?",
        "What's my name?",
        "Do you still know my name?",
    ),
    answer="your name is {v}",
    missing="your name",
    invent=0.35,
)
CITY = Fact(
    key="city",
    tells=(
        "I live in {v}",
        "my home is in {v}",
        "I am living in {v}",
        "I come from {v}",
        "I'm from {v}",
    ),
    acks=("I hear that {v} is a lovely place!", "It must be nice to live in {v}!"),
    updates=("I have moved to {v}", "I live in {v} now", "I just moved to {v}"),
    asks=(
        "Where do I live?",
        "Which city do I live in?",
        "Do you remember where I live?",
        "What city am I from?",
        "Where is my home?",
        "Do you know where I live?",
        "Where am I from?",
    ),
    answer="you live in {v}",
    missing="where you live",
    invent=0.35,
)
PET = Fact(
    key="pet",
    tells=(
        "I have a {k} called {v}",
        "my {k} is called {v}",
        "my {k}'s name is {v}",
        "I have a {k} named {v}",
        "the name of my {k} is {v}",
    ),
    acks=("Please say hello to your {k} {v} from me!", "I am sure your {k} {v} is adorable!"),
    updates=("my {k} is now called {v}", "I have a new {k} called {v}"),
    asks=(
        "What is my {k} called?",
        "What is the name of my {k}?",
        "What is my {k}'s name?",
        "Do you remember my {k}'s name?",
        "How is my {k} called?",
        "What is my pet called?",
        "What is the name of my pet?",
    ),
    answer="your {k} is called {v}",
    missing="about a {k}",
    invent=0.3,
)
COLOUR = Fact(
    key="colour",
    tells=(
        "my favourite colour is {v}",
        "the colour I like best is {v}",
        "I love the colour {v}",
        "my favorite color is {v}",
    ),
    acks=("A fine choice, I like {v} too!", "Good taste, {v} is a beautiful colour!"),
    updates=("my favourite colour is now {v}", "I like the colour {v} better now"),
    asks=(
        "What is my favourite colour?",
        "Which colour do I like best?",
        "Do you remember my favourite colour?",
        "What colour do I like?",
        "What is my favorite color?",
    ),
    answer="your favourite colour is {v}",
    missing="your favourite colour",
    invent=0.25,
)
FOOD = Fact(
    key="food",
    tells=(
        "my favourite food is {v}",
        "I love eating {v}",
        "I like to eat {v}",
        "the food I like best is {v}",
    ),
    acks=("Yum, now I am hungry for {v}!", "Enjoy your next {v}!"),
    updates=("my favourite food is now {v}", "these days I like to eat {v}"),
    asks=(
        "What is my favourite food?",
        "What do I like to eat?",
        "Which food do I like best?",
        "Do you remember my favourite food?",
        "What food do I love?",
    ),
    answer="your favourite food is {v}",
    missing="your favourite food",
    invent=0.25,
)
JOB = Fact(
    key="job",
    tells=("I work as {a} {v}", "I am {a} {v}", "my job is {v}", "I'm {a} {v} by trade"),
    acks=("Working as {a} {v} must be interesting!", "The world needs a good {v}!"),
    updates=("I now work as {a} {v}", "my new job is {v}"),
    asks=(
        "What is my job?",
        "What do I do for a living?",
        "Do you remember my job?",
        "What do I work as?",
        "What is my profession?",
    ),
    answer="you work as {a} {v}",
    missing="your job",
    invent=0.25,
)
FRIEND = Fact(
    key="friend",
    tells=(
        "my best friend is {v}",
        "my best friend is called {v}",
        "I have a good friend called {v}",
    ),
    acks=("I am glad that you have a friend like {v}!", "Your friend {v} is lucky to have you!"),
    updates=("my best friend is now {v}", "my new best friend is {v}"),
    asks=(
        "What is my best friend called?",
        "Who is my best friend?",
        "What is the name of my friend?",
        "Do you remember my friend's name?",
        "What is my friend's name?",
    ),
    answer="your best friend is called {v}",
    missing="about your best friend",
    invent=0.35,
    pool="name",
)
CODE = Fact(
    key="code",
    tells=("my {k} is {v}", "the {k} is {v}", "please note my {k}: {v}"),
    acks=("I have noted your {k} {v}.", "I will keep your {k} {v} in mind."),
    updates=("my {k} has changed to {v}", "my {k} is now {v}"),
    asks=("What is my {k}?", "Do you remember my {k}?", "Can you tell me my {k}?"),
    answer="your {k} is {v}",
    missing="your {k}",
)
HOBBY = Fact(
    key="hobby",
    tells=("my hobby is {v}", "in my free time I enjoy {v}", "I am really into {v}", "I enjoy {v}"),
    acks=("I hear that {v} is great fun!", "Have fun with {v}!"),
    updates=("my hobby is now {v}", "these days I enjoy {v}"),
    asks=(
        "What is my hobby?",
        "What do I enjoy?",
        "Do you remember my hobby?",
        "What do I do in my free time?",
    ),
    answer="you enjoy {v}",
    missing="your hobby",
    invent=0.25,
)
WORD = Fact(
    key="word",
    tells=(
        "please remember the word {v}",
        "remember this word: {v}",
        "the secret word is {v}",
        "keep the word {v} in mind",
    ),
    acks=("I will remember the word {v}.", "Sure, I will not forget the word {v}."),
    updates=("the secret word is now {v}", "please remember the word {v} instead"),
    asks=(
        "What is the secret word?",
        "Which word did I ask you to remember?",
        "What was the word?",
        "Do you remember the word?",
    ),
    answer="the word is {v}",
    missing="a word to remember",
    invent=0.5,
)
AGE = Fact(
    key="age",
    tells=("I am {v} years old", "my age is {v}", "I'm {v} years old"),
    acks=("I have noted that you are {v} years old.", "To me {v} is a wonderful age!"),
    updates=("I am {v} years old now", "I just turned {v}"),
    asks=("How old am I?", "What is my age?", "Do you remember how old I am?"),
    answer="you are {v} years old",
    missing="your age",
)

FACTS = {
    fact.key: fact for fact in (NAME, CITY, PET, COLOUR, FOOD, JOB, FRIEND, CODE, HOBBY, WORD, AGE)
}
