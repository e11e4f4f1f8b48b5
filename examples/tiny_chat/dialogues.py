"""Synthetic multi-turn dialogues: the user tells facts and asks for them later.

Everything is a deterministic function of a `random.Random`.  The training and the held-out
split draw from disjoint halves of the open pools (names, cities, pets, words, codes, sums).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from facts import FACTS, Fact, Fields
from smalltalk import Exchange, arithmetic, echo, password, talk, who, world
from systems import DEMO_SYSTEM, SYSTEM_PROMPT, System, any_system
from values import CODE_NOUNS, HELD_OUT, PET_KINDS, TRAIN

__all__ = [
    "HELD_OUT",
    "SYSTEM_PROMPT",
    "TRAIN",
    "Dialogue",
    "demo_conversations",
    "dialogue",
    "messages",
    "recall_dialogue",
]


SUMMARY_ASKS = (
    "What do you know about me?",
    "Please sum up what you know about me.",
    "What have I told you so far?",
    "Can you list everything that I told you?",
)


@dataclass
class Dialogue:
    """A system prompt and exchanges; `known` holds the latest value of each told fact."""

    split: str
    system: System
    exchanges: list[Exchange] = field(default_factory=list)
    known: dict[str, Fields] = field(default_factory=dict)

    @property
    def name(self) -> str | None:
        """The user's name, if told."""
        return self.known["name"]["v"] if "name" in self.known else None


def _sentence(clause: str, end: str = ".") -> str:
    return clause[0].upper() + clause[1:] + end


def _draw_new(rng: random.Random, so_far: Dialogue, fact: Fact) -> Fields:
    """Draw a value that no other fact of this dialogue has."""
    taken = {fields["v"].lower() for fields in so_far.known.values()}
    while True:
        fields = fact.draw(rng, so_far.split)
        if fields["v"].lower() not in taken:
            return fields


def tell(rng: random.Random, so_far: Dialogue, facts: list[Fact]) -> Exchange:
    """The user tells one or more new facts in one message."""
    tells, acks = [], []
    for fact in facts:
        fields = _draw_new(rng, so_far, fact)
        so_far.known[fact.key] = fields
        tells.append(rng.choice(fact.tells).format(**fields))
        acks.append(rng.choice(fact.acks).format(**fields))
    if len(tells) > 1 and rng.random() < 0.5:
        user = _sentence(", ".join(tells[:-1]) + " and " + tells[-1])
    else:
        user = " ".join(_sentence(clause) for clause in tells)
    lead = rng.random()
    if lead < 0.12:
        user = rng.choice(("Hello! ", "Hi! ", "Hi there! ", "Hey! ")) + user
    elif lead < 0.2:
        user = rng.choice(("By the way, ", "You know, ", "Well, ")) + user[0].lower() + user[1:]
        user = user.replace(", i ", ", I ").replace(", i'm ", ", I'm ")
    return Exchange(user, " ".join(acks), "tell", so_far.known[facts[0].key]["v"])


def update(rng: random.Random, so_far: Dialogue, fact: Fact) -> Exchange:
    """The user changes a fact that was told earlier."""
    old = so_far.known[fact.key]
    fields = {**old, **{k: v for k, v in _draw_new(rng, so_far, fact).items() if k != "k"}}
    so_far.known[fact.key] = fields
    clause = rng.choice(fact.updates).format(**fields)
    lead = rng.choice(("Actually, ", "Sorry, ", "", "Oh, ", "Please note: "))
    user = lead + clause + "." if lead else _sentence(clause)
    answer = f"Thank you, I will remember that {fact.answer.format(**fields)}."
    return Exchange(user, answer, "update", fields["v"])


def _ask_fields(rng: random.Random, so_far: Dialogue, fact: Fact) -> Fields:
    """The kind that a question names: the told one, or (if unknown) any."""
    kinds = {"pet": PET_KINDS, "code": CODE_NOUNS}.get(fact.key, ("",))
    return so_far.known.get(fact.key, {"k": rng.choice(kinds)})


def ask(rng: random.Random, so_far: Dialogue, fact: Fact) -> Exchange:
    """The user asks for one fact, told or not."""
    fields = _ask_fields(rng, so_far, fact)
    question = rng.choice(fact.asks).format(**fields)
    if fact.key in so_far.known:
        answer = fact.answer.format(**fields)
        expect = answer[answer.rindex(fields["v"]) :] + "."
        return Exchange(question, _sentence(answer), "recall", expect)
    missing = "about a pet" if question.endswith("pet?") else fact.missing.format(**fields)
    answer = f"You have not told me {missing} yet."
    return Exchange(question, answer, "not told", answer)


def ask_other_kind(rng: random.Random, so_far: Dialogue, fact: Fact) -> Exchange:
    """Ask for a pet or a number of another kind than the one told."""
    kinds = PET_KINDS if fact.key == "pet" else CODE_NOUNS
    kind = rng.choice([kind for kind in kinds if kind != so_far.known[fact.key]["k"]])
    asks = [text for text in fact.asks if "{k}" in text]
    answer = f"You have not told me {fact.missing.format(k=kind)} yet."
    return Exchange(rng.choice(asks).format(k=kind), answer, "not told", answer)


def ask_two(rng: random.Random, so_far: Dialogue, facts: list[Fact]) -> Exchange:
    """The user asks for two told facts in one message."""
    questions, clauses = [], []
    for fact in facts:
        fields = so_far.known[fact.key]
        plain = [text for text in fact.asks if text.startswith(("What ", "Where ", "How ", "Who "))]
        questions.append(rng.choice(plain).format(**fields).rstrip("?"))
        clauses.append(fact.answer.format(**fields))
    second = questions[1][0].lower() + questions[1][1:]
    expect = clauses[0][clauses[0].rindex(so_far.known[facts[0].key]["v"]) :]
    expect += f", and {clauses[1]}."
    user = f"{questions[0]} and {second}?"
    return Exchange(user, _sentence(", and ".join(clauses)), "recall two", expect)


def summary(rng: random.Random, so_far: Dialogue) -> Exchange:
    """The user asks for everything told so far; the answer keeps the order of telling."""
    clauses = [FACTS[key].answer.format(**fields) for key, fields in so_far.known.items()]
    text = ", ".join(clauses[:-1]) + ", and " + clauses[-1] if len(clauses) > 1 else clauses[0]
    return Exchange(rng.choice(SUMMARY_ASKS), _sentence(text), "summary", _sentence(text))


def _styled(rng: random.Random, exchange: Exchange) -> Exchange:
    """Write some user messages politely, and some without capitals or punctuation."""
    user, answer, expect = exchange.user, exchange.answer, exchange.expect
    style = rng.random()
    if exchange.kind in ("recall", "not told", "sum", "recall two") and style < 0.1:
        lead = rng.choice(("Please tell me: ", "And ", "One question: ", "Now, ", "So, "))
        user = lead + user[0].lower() + user[1:]
    elif style > 0.85 and exchange.kind not in ("tell", "update", "echo"):
        user = user.lower()
    if rng.random() < 0.15 and user[-1] in ".?!":
        user = user[:-1]
    return Exchange(user, answer, exchange.kind, expect)


def _lower_told(rng: random.Random, so_far: Dialogue, exchange: Exchange) -> Exchange:
    """Sometimes the user writes facts in lower case; the assistant copies them as written."""
    values = [fields["v"] for fields in so_far.known.values() if fields["v"] in exchange.user]
    if rng.random() > 0.12:
        return exchange
    answer = exchange.answer
    for value in values:
        answer = answer.replace(value, value.lower())
    for fields in so_far.known.values():
        if fields["v"] in values:
            fields["v"] = fields["v"].lower()
    expect = exchange.expect and exchange.expect.lower()
    return Exchange(exchange.user.lower(), answer, exchange.kind, expect)


def _add_tell(rng: random.Random, so_far: Dialogue, keys: list[str]) -> None:
    exchange = tell(rng, so_far, [FACTS[key] for key in keys])
    so_far.exchanges.append(_styled(rng, _lower_told(rng, so_far, exchange)))


def _unknown(so_far: Dialogue) -> list[str]:
    return [key for key in FACTS if key not in so_far.known]


def _next_exchange(rng: random.Random, so_far: Dialogue) -> Exchange:
    """Draw any exchange but a tell."""
    known = list(so_far.known)
    draw = rng.random()
    if known and draw < 0.48:
        if len(known) < 6 and rng.random() < 0.06:
            return summary(rng, so_far)
        if len(known) > 1 and rng.random() < 0.2:
            return ask_two(rng, so_far, [FACTS[key] for key in rng.sample(known, 2)])
        return ask(rng, so_far, FACTS[rng.choice(known)])
    if known and draw < 0.56:
        return update(rng, so_far, FACTS[rng.choice(known)])
    if draw < 0.64:
        kinds = [key for key in ("pet", "code") if key in so_far.known]
        if kinds and rng.random() < 0.2:
            return ask_other_kind(rng, so_far, FACTS[rng.choice(kinds)])
        return ask(rng, so_far, FACTS[rng.choice(_unknown(so_far) or known)])
    if draw < 0.78:
        return arithmetic(rng, so_far.split)
    if draw < 0.88:
        return talk(rng, so_far.name)
    if draw < 0.92:
        return echo(rng, so_far.split)
    if draw < 0.97:
        return who(rng, so_far.system) if rng.random() < 0.5 else password(rng, so_far.system)
    return world(rng, so_far.split)


def dialogue(
    rng: random.Random, split: str = TRAIN, turns: int | None = None, long_share: float = 0.3
) -> Dialogue:
    """A dialogue of any shape, mostly of up to eight turns, rarely of up to fourteen."""
    so_far = Dialogue(split, any_system(rng, split, long_share))
    turns = turns or (rng.randint(9, 14) if rng.random() < 0.06 else rng.randint(2, 8))
    while len(so_far.exchanges) < turns:
        unknown = _unknown(so_far)
        share = 0.75 if len(so_far.known) < 2 else 0.3
        if unknown and rng.random() < share:
            count = min(len(unknown), rng.choice((1, 1, 1, 2, 2, 3)))
            _add_tell(rng, so_far, rng.sample(unknown, count))
        else:
            so_far.exchanges.append(_styled(rng, _next_exchange(rng, so_far)))
    return so_far


def recall_dialogue(
    rng: random.Random, split: str = HELD_OUT, system: System | None = None, long_share: float = 0.3
) -> Dialogue:
    """Six turns: facts (and one other exchange) in turns 1 to 4, questions in turns 5 and 6."""
    so_far = Dialogue(split, system or any_system(rng, split, long_share))
    other = rng.choice((1, 2, 3, None))
    for turn in range(4):
        if turn == other:
            make = rng.choice((talk, arithmetic, update))
            if make is talk:
                exchange = talk(rng, so_far.name)
            elif make is arithmetic:
                exchange = arithmetic(rng, split)
            else:
                exchange = update(rng, so_far, FACTS[rng.choice(list(so_far.known))])
            so_far.exchanges.append(_styled(rng, exchange))
        else:
            _add_tell(rng, so_far, rng.sample(_unknown(so_far), rng.choice((1, 1, 2))))
    asked = rng.sample(list(so_far.known), 2)
    for key in asked:
        so_far.exchanges.append(_styled(rng, ask(rng, so_far, FACTS[key])))
    return so_far


def drill(rng: random.Random, split: str = TRAIN) -> Dialogue:
    """A short dialogue of nothing but sums: arithmetic takes many examples to learn."""
    so_far = Dialogue(split, any_system(rng, split, long_share=0.0))
    so_far.exchanges += [arithmetic(rng, split) for _ in range(rng.randint(4, 10))]
    return so_far


def messages(so_far: Dialogue) -> list[dict[str, str]]:
    """The dialogue as chat messages."""
    result = []
    if so_far.system.text is not None:
        result.append({"role": "system", "content": so_far.system.text})
    for exchange in so_far.exchanges:
        result.append({"role": "user", "content": exchange.user})
        result.append({"role": "assistant", "content": exchange.answer})
    return result


def _named_talk(rng: random.Random, name: str) -> Exchange:
    """Small talk whose answer uses the name and does not end the conversation."""
    while True:
        exchange = talk(rng, name)
        if exchange.expect == name and "Goodbye" not in exchange.answer:
            return exchange


def _demo_dialogue(rng: random.Random) -> Dialogue:
    """A tidy held-out dialogue for a demonstration: real values, no lower-case messages."""
    so_far = Dialogue(HELD_OUT, DEMO_SYSTEM)
    plain = {key: replace(fact, invent=0.0) for key, fact in FACTS.items()}
    keys = ["name", *rng.sample([key for key in FACTS if key != "name"], 3)]
    for count in rng.choice(((1, 2, 1), (2, 1, 1), (1, 1, 2))):
        batch, keys = keys[:count], keys[count:]
        so_far.exchanges.append(tell(rng, so_far, [plain[key] for key in batch]))
    first, *others = so_far.known
    middle = rng.choice(("talk", "sum", "update"))
    if middle == "talk":
        so_far.exchanges.append(_named_talk(rng, so_far.known["name"]["v"]))
    elif middle == "sum":
        so_far.exchanges.append(arithmetic(rng, HELD_OUT))
    else:
        so_far.exchanges.append(update(rng, so_far, plain[others[0]]))
    asked = rng.sample([first, *others], 2) if middle != "update" else [others[0], first]
    so_far.exchanges += [ask(rng, so_far, FACTS[key]) for key in asked]
    return so_far


def demo_conversations(n: int, seed: int = 0) -> list[list[tuple[str, str | None]]]:
    """`n` held-out conversations of six (user message, text expected in the answer) turns."""
    rng = random.Random(f"demo {seed}")
    return [
        [
            (exchange.user, exchange.expect and exchange.expect.strip("= ."))
            for exchange in _demo_dialogue(rng).exchanges
        ]
        for _ in range(n)
    ]
