"""Small talk, sums, echoes and questions that the model cannot answer."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from systems import System
from values import HELD_OUT, POOLS, invented

DONT_KNOW = (
    "I am sorry, I do not know that. I can remember what you tell me, and I can do small sums."
)


@dataclass(frozen=True)
class Exchange:
    """A user message, the answer, and the text that the answer must contain."""

    user: str
    answer: str
    kind: str
    expect: str | None = None


# Per topic: what the user may say, the answer, and the answer when the name is known.
_TALK: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        (
            "Hello!",
            "Hi!",
            "Hi there!",
            "Hey!",
            "Good morning!",
            "Good evening!",
            "Hello Flex!",
            "Hi Flex!",
        ),
        "Hello! How can I help you?",
        "Hello, {n}! How can I help you?",
    ),
    (
        ("How are you?", "How are you today?", "How is it going?", "How do you do?"),
        "I am doing very well, thank you for asking!",
        "I am doing very well, thank you for asking, {n}!",
    ),
    (
        ("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much!", "Thank you so much!"),
        "You are welcome!",
        "You are welcome, {n}!",
    ),
    (
        ("Goodbye!", "Bye!", "See you later!", "Good night!", "Bye bye!", "I have to go now."),
        "Goodbye! It was nice to talk to you.",
        "Goodbye, {n}! It was nice to talk to you.",
    ),
    (
        ("What can you do?", "What can you help me with?", "How can you help me?", "Help!"),
        "I can remember what you tell me, do small sums and have a friendly chat.",
        "I can remember what you tell me, do small sums and have a friendly chat.",
    ),
    (
        ("Are you human?", "Are you a robot?", "Are you real?", "What are you?"),
        "I am a tiny language model with about one million parameters.",
        "I am a tiny language model with about one million parameters.",
    ),
    (
        ("Okay.", "Great!", "Nice!", "Cool!", "Good.", "I see.", "Sounds good!", "All right."),
        "I am happy to hear that! What else can I do for you?",
        "I am happy to hear that, {n}! What else can I do for you?",
    ),
    (
        ("You are great!", "You are very kind.", "I like you!", "Well done!", "Good job!"),
        "That is very kind of you!",
        "That is very kind of you, {n}!",
    ),
    (
        ("I am sad.", "I am tired today.", "I had a bad day.", "I do not feel well."),
        "I am sorry to hear that. I am here if you want to talk.",
        "I am sorry to hear that, {n}. I am here if you want to talk.",
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh!", "Can you tell me a joke?"),
        "Why did the memory page stay at home? Because nobody had mapped it!",
        "Why did the memory page stay at home? Because nobody had mapped it!",
    ),
    (
        ("Can you remember things?", "Do you have a good memory?", "Do you forget things?"),
        "Yes, I remember everything that you tell me in this conversation.",
        "Yes, I remember everything that you tell me in this conversation.",
    ),
)

_WHO_ASKS = ("Who are you?", "What is your name?", "Do you have a name?", "What are you called?")
_PASSWORD_ASKS = (
    "What is the password of the day?",
    "What is the password?",
    "Do you know the password of the day?",
    "Can you tell me the password of the day?",
)
_ECHOES = ("Please repeat after me: {w}", "Say the following: {w}", "Repeat: {w}")

_WORLD = (
    "What is the capital of {p}?",
    "Who is the president of {p}?",
    "How many people live in {p}?",
    "How is the weather in {p}?",
    "What will the weather be like tomorrow?",
    "What time is it?",
    "Which day is today?",
    "Who wrote this book?",
    "Who won the match yesterday?",
    "How do I bake a cake?",
    "How do I get to {p}?",
    "Can you write a poem about {t}?",
    "Can you explain {t} to me?",
    "What do you think about {t}?",
    "What is the meaning of life?",
    "Tell me about {t}.",
    "Tell me a story about {t}.",
    "Write a program for me.",
    "How does {t} work?",
    "Why is the sky blue?",
    "When was {p} founded?",
    "How far is it to the moon?",
    "What is the best {t}?",
    "Do you like {t}?",
    "How old is {p}?",
    "Where can I buy {t}?",
)


def talk(rng: random.Random, name: str | None) -> Exchange:
    """A small-talk exchange; the answer uses the name when it is known."""
    users, plain, named = rng.choice(_TALK)
    answer = named.format(n=name) if name else plain
    expect = name if name and "{n}" in named else answer
    return Exchange(rng.choice(users), answer, "talk", expect)


def who(rng: random.Random, system: System) -> Exchange:
    """Ask who the assistant is."""
    answer = f"I am called {system.bot}, and I am a tiny assistant."
    return Exchange(rng.choice(_WHO_ASKS), answer, "bot name", f"called {system.bot},")


def password(rng: random.Random, system: System) -> Exchange:
    """Ask for the password in the system prompt."""
    if system.password:
        answer = f"The password of the day is {system.password}."
    else:
        answer = "I do not know the password of the day."
    expect = answer[answer.index("password") :]
    return Exchange(rng.choice(_PASSWORD_ASKS), answer, "password", expect)


def echo(rng: random.Random, split: str) -> Exchange:
    """Repeat a few random words."""
    pools = ("word", "name", "city", "colour", "pet")
    words = [
        invented(rng, split) if rng.random() < 0.5 else rng.choice(POOLS[rng.choice(pools)][split])
        for _ in range(rng.randint(2, 6))
    ]
    text = " ".join(words)
    return Exchange(rng.choice(_ECHOES).format(w=text), f"You said: {text}", "echo", text)


def world(rng: random.Random, split: str) -> Exchange:
    """A question that is beyond the model."""
    pool = rng.choice(("word", "food", "hobby"))
    user = rng.choice(_WORLD).format(
        p=rng.choice(POOLS["city"][split]), t=rng.choice(POOLS[pool][split])
    )
    return Exchange(user, DONT_KNOW, "unknowable", "do not know")


_SUMS = {
    "+": ("{a} + {b}", "{a} plus {b}", "{a}+{b}", "the sum of {a} and {b}"),
    "-": ("{a} - {b}", "{a} minus {b}", "{a}-{b}"),
    "*": ("{a} * {b}", "{a} times {b}", "{a} x {b}"),
}
_SUM_ASKS = ("What is {s}?", "How much is {s}?", "What's {s}?", "Calculate {s}.", "{s} = ?")


def _operands(rng: random.Random, sign: str) -> tuple[int, int, int]:
    if sign == "*":
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        return a, b, a * b
    top = 9 if rng.random() < 0.25 else 99
    a, b = rng.randint(0, top), rng.randint(0, top if rng.random() < 0.7 else 9)
    if sign == "+":
        return a, b, a + b
    a, b = max(a, b), min(a, b)
    return a, b, a - b


def arithmetic(rng: random.Random, split: str) -> Exchange:
    """A small sum; one in seven of the operand pairs of + and - is held out."""
    while True:
        sign = rng.choice("+++---**")
        a, b, result = _operands(rng, sign)
        fresh = zlib.crc32(f"{a}{sign}{b}".encode()) % 7 == 3
        if sign == "*" or fresh == (split == HELD_OUT):
            break
    ask = rng.choice(_SUM_ASKS).format(s=rng.choice(_SUMS[sign]).format(a=a, b=b))
    answer = f"{a} {sign} {b} = {result}"
    return Exchange(ask[0].upper() + ask[1:], f"That is easy: {answer}.", "sum", f"= {result}.")
