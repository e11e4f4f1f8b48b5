"""Pools of values that the dialogues copy, split into training and held-out halves."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

TRAIN = "train"
HELD_OUT = "held_out"

_NAMES = """
Aaron Abigail Adam Adele Agnes Ahmed Aisha Alan Albert Alex Alice Alina Amara Amelia Amir Amy
Andre Andrea Angela Anna Anton Aria Arthur Astrid Ava Axel Beatrice Ben Benjamin Bianca Bjorn
Boris Brandon Brenda Brian Bruno Camila Carl Carla Carlos Carmen Caroline Cecilia Charles
Charlotte Chloe Chris Clara Claire Colin Connor Cora Daisy Dana Daniel Daria David Dennis Diana
Diego Dmitri Dora Dylan Edgar Edith Elena Eli Elias Elif Elisa Ella Ellen Elliot Elsa Emil Emily
Emma Enzo Eric Erica Esther Ethan Eva Evelyn Fabian Farah Fatima Felix Fiona Florian Frances
Frank Freya Gabriel George Gina Giulia Gloria Grace Greta Gustav Hana Hannah Harry Hassan Hazel
Heidi Helen Henry Hugo Ian Ida Ines Ingrid Irene Iris Isaac Isabel Ivan Jack Jacob James Jan Jana
Jane Jasmine Jason Jasper Jenna Joan Joanna Joel Johan John Jonas Jonathan Jose Joseph Josh Judith
Julia Julian June Kai Karen Karim Karl Kate Kevin Kim Klaus Kofi Lara Lars Laura Lea Leila Lena
Leo Leon Liam Lily Linda Lisa Logan Lola Lorenzo Louis Lucas Lucia Luis Luke Luna Lydia Maja
Marc Marco Margaret Maria Marie Mark Marta Martin Mary Mateo Max Maya Megan Mei Mia Michael Mila
Milo Mina Miriam Mohammed Mona Nadia Naomi Natalie Nathan Nico Nina Noah Nora Olga Oliver Olivia
Omar Oscar Otto Pablo Paul Paula Pedro Peter Petra Philip Priya Quentin Rachel Rafael Raj Ravi
Rebecca Rita Robert Robin Rosa Rosie Ruby Ruth Ryan Sam Samira Samuel Sandra Sara Sebastian Selma
Simon Sofia Sonja Stefan Stella Stephen Susan Tamara Tara Teresa Thea Theo Thomas Tim Tina Tobias
Tom Uma Una Ursula Valentina Vera Victor Viola Vivian Walter Wanda Wei Wendy William Xavier Yara
Yasmin Yuki Yusuf Zara Zoe
"""

_CITIES = """
Aarhus Accra Adelaide Algiers Amman Amsterdam Ankara Antwerp Athens Atlanta Auckland Austin Baku
Bangkok Barcelona Basel Beirut Belfast Belgrade Bergen Berlin Bern Bilbao Bogota Bologna Bonn
Bordeaux Boston Bratislava Bremen Brisbane Bristol Bruges Brussels Bucharest Budapest Cairo
Calgary Canberra Cardiff Casablanca Chicago Cologne Copenhagen Cordoba Cork Dakar Dallas Delhi
Denver Detroit Dhaka Dresden Dubai Dublin Dundee Durban Edinburgh Essen Exeter Florence Fukuoka
Galway Gdansk Geneva Genoa Ghent Glasgow Gothenburg Granada Graz Hamburg Hanoi Havana Helsinki
Houston Istanbul Izmir Jakarta Jerusalem Kampala Kathmandu Kigali Kingston Krakow Kyoto Lagos
Lahore Leeds Leipzig Lille Lima Limerick Linz Lisbon Liverpool Ljubljana London Lucerne Lusaka
Luxembourg Lyon Madrid Malaga Malmo Manchester Manila Marseille Melbourne Memphis Miami Milan
Minsk Montreal Mumbai Munich Nairobi Nantes Naples Nashville Nice Nicosia Odense Orlando Osaka
Oslo Ottawa Oxford Palermo Paris Perth Phoenix Pisa Porto Portland Prague Quebec Quito Rabat Reno
Reykjavik Riga Rome Rotterdam Salzburg Santiago Seattle Seoul Seville Shanghai Singapore Sofia
Split Stockholm Stuttgart Sydney Taipei Tallinn Tampere Tbilisi Tirana Tokyo Toledo Toronto
Toulouse Trieste Tromso Tunis Turin Utrecht Valencia Vancouver Venice Verona Vienna Vilnius
Warsaw Wellington Windhoek York Yerevan Zagreb Zurich
"""

_PETS = """
Apollo Bandit Basil Bella Biscuit Blaze Bruno Bubbles Buddy Buttons Caramel Charlie Clover Coco
Comet Cookie Daisy Dexter Domino Duke Echo Fern Flash Fluffy Ginger Gizmo Goldie Hazel Honey
Jasper Jelly Kiwi Lucky Luna Maple Milo Mittens Mocha Muffin Nacho Nugget Olive Oreo Pancake
Patches Peanut Pebble Pepper Pickle Pixel Pluto Poppy Pumpkin Rex Rocky Rusty Sandy Scout Shadow
Simba Smokey Snowy Socks Sparky Spot Storm Sunny Taco Teddy Tiger Toffee Truffle Turbo Waffles
Whiskers Ziggy
"""

_COLOURS = """
amber apricot aqua beige black blue bronze brown burgundy charcoal cherry cobalt copper coral
cream crimson cyan emerald fuchsia gold golden green grey indigo ivory jade khaki lavender lemon
lilac lime magenta maroon mauve mint mustard navy ochre olive orange peach pink plum purple red
ruby rust salmon scarlet silver tan teal turquoise violet white yellow
"""

_FOODS = """
apple pie|baked beans|bibimbap|borscht|burritos|butter chicken|carrot cake|cheese fondue
cheesecake|chicken soup|chilli|chocolate|couscous|crepes|croissants|curry|dumplings|falafel
fish and chips|french fries|fried rice|garlic bread|gnocchi|goulash|grilled salmon|gumbo|hummus
ice cream|kebab|kimchi|lasagne|lentil soup|macaroni|mango sorbet|meatballs|miso soup|moussaka
mushroom risotto|nachos|noodles|omelette|onion soup|pad thai|paella|pancakes|pasta|pea soup|pho
pierogi|pizza|porridge|potato salad|quiche|ramen|ratatouille|ravioli|rice pudding|roast chicken
salad|samosas|sauerkraut|scones|shakshuka|spaghetti|spring rolls|steak|strawberries|stuffed peppers
sushi|tacos|tapas|tempura|tiramisu|toast|tofu|tomato soup|waffles|watermelon
"""

_JOBS = """
accountant actor architect artist astronomer baker barber beekeeper biologist bookseller builder
butcher carpenter chef chemist cleaner clerk composer cook dancer dentist designer detective
doctor driver editor electrician engineer farmer firefighter fisherman florist gardener geologist
goldsmith guide hairdresser historian janitor jeweller journalist judge lawyer lecturer librarian
locksmith magician mechanic midwife miner model musician nurse optician painter pharmacist
photographer physicist pianist pilot plumber poet porter potter producer professor programmer
psychologist receptionist reporter sailor scientist sculptor secretary singer soldier surgeon
surveyor tailor teacher technician tester trainer translator vet waiter watchmaker welder writer
"""

_HOBBIES = """
archery|badminton|baking|baseball|basketball|bird watching|board games|bowling|boxing|camping
canoeing|chess|climbing|cooking|crosswords|cycling|dancing|darts|diving|drawing|embroidery|fencing
fishing|football|gardening|golf|gymnastics|hiking|hockey|horse riding|ice skating|jogging|judo
juggling|karate|kayaking|knitting|origami|painting|photography|playing the drums|playing the flute
playing the guitar|playing the piano|playing the violin|poetry|pottery|puzzles|reading|rowing
rugby|running|sailing|sewing|singing|skateboarding|skiing|snowboarding|squash|surfing|swimming
table tennis|tennis|video games|volleyball|walking|weaving|woodwork|yoga
"""

_WORDS = """
acorn anchor apple arrow atlas bagel balloon banana basket beacon bell blanket bottle bridge
bucket butterfly button cabin cactus camera candle canyon carpet castle cave circle cloud clover
coffee compass cottage cradle crystal curtain desert diamond dolphin dragon drum eagle feather
fiddle forest fountain galaxy garden glacier hammer harbour harvest helmet horizon island jacket
jungle kettle kingdom kitten ladder lantern lighthouse lizard magnet marble meadow mirror monsoon
mountain needle oasis ocean orchard orchid otter paddle panda paper parrot pebble pencil penguin
pepper piano pillow pirate planet pocket puzzle rabbit rainbow ribbon river rocket saddle sailboat
sandal satellite scissors shadow shelter shovel spider sponge squirrel staircase sunflower sunrise
teapot telescope temple thunder ticket tractor treasure trumpet tunnel turtle umbrella valley
velvet village violin volcano walnut waterfall whale whistle window winter wizard zebra
"""

PET_KINDS = ("dog", "cat", "rabbit", "hamster", "parrot", "horse", "turtle")
CODE_NOUNS = ("door code", "locker code", "ticket number", "booking number", "order number")

_ONSETS = "b br c ch d dr f g gr h j k kl l m n p pr r s st t tr v w z"
_VOWELS = "a e i o u ai ea ia o a e i"
_CODAS = ["", "", "", "l", "n", "r", "s", "t", "m", "x", "nd", "ck"]


def _pool(text: str) -> list[str]:
    """Split a pool whose entries may hold spaces."""
    return [entry.strip() for line in text.strip().splitlines() for entry in line.split("|")]


def _split(entries: list[str]) -> dict[str, list[str]]:
    """Hold out one entry in seven of a pool."""
    entries = sorted(set(entries))
    return {
        TRAIN: [entry for i, entry in enumerate(entries) if i % 7 != 3],
        HELD_OUT: [entry for i, entry in enumerate(entries) if i % 7 == 3],
    }


POOLS = {
    "name": _split(_NAMES.split()),
    "city": _split(_CITIES.split()),
    "pet": _split(_PETS.split()),
    "colour": _split(_COLOURS.split()),
    "food": _split(_pool(_FOODS)),
    "job": _split(_JOBS.split()),
    "hobby": _split(_pool(_HOBBIES)),
    "word": _split(_WORDS.split()),
}


def held_out(text: str) -> bool:
    """Whether a value that is made up on the fly belongs to the held-out split."""
    return zlib.crc32(text.encode()) % 7 == 3


def _redraw(rng: random.Random, split: str, make: Callable[[random.Random], str]) -> str:
    """Make values until one belongs to the wanted split."""
    while True:
        value = make(rng)
        if held_out(value) == (split == HELD_OUT):
            return value


def _syllables(rng: random.Random) -> str:
    count = rng.choice((1, 2, 2, 3))
    parts = [rng.choice(_ONSETS.split()) + rng.choice(_VOWELS.split()) for _ in range(count)]
    return "".join(parts) + rng.choice(_CODAS)


def _digits(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(rng.choice((3, 4, 4, 4, 5, 6))))


def invented(rng: random.Random, split: str) -> str:
    """A made-up lower-case word."""
    return _redraw(rng, split, _syllables)


def code(rng: random.Random, split: str) -> str:
    """A number of three to six digits."""
    return _redraw(rng, split, _digits)


def pick(rng: random.Random, split: str, pool: str, invent: float = 0.0) -> str:
    """A value of a pool, or with probability `invent` a made-up word."""
    if rng.random() < invent:
        word = invented(rng, split)
        return word if pool == "word" else word.capitalize()
    return rng.choice(POOLS[pool][split])
