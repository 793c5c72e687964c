"""The word lists that the demo model knows: nouns, names, cities, colors, days and months.

Contract: plain tuples of strings, in a fixed order, because the training data is sampled from them
by index. A change of order changes the data of every seed, so a change here needs new weights. No
noun occurs in the wording of a question (for example, "word", "list" and "time" are missing),
because `read` searches a question for these nouns. This module does not depend on the tasks.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS: tuple[str, ...] = _words(
    """
    airport angel apple arrow autumn baby bag balloon banana bank barn basket beach bean bear
    bed bee bell bike bird blanket boat bone book boot bottle box boy bread brick bridge
    brother butter button cake camel camera candle candy cap car card carpet carrot castle cat
    chair cheese chess chicken child clock cloud coat coffee cookie corn cotton cow crown cup
    desert desk diamond doctor dog doll donkey door dragon dress driver earth egg elephant
    engine eye family farm farmer finger fire fish flag flame floor flower forest fox friend
    frog fruit garden gate giant gift girl glass globe goat gold grape grass guitar hammer hand
    hat heart honey horse hotel house ice iron island juice jungle key king kitchen kite knife
    lake lamp lemon lion lunch machine map market melon milk mirror money monkey moon mother
    mountain mouse mouth music night nose nurse oak ocean orange orchard paint palace paper
    park pear pen pepper piano picture pie pig planet plate plum pocket potato pumpkin puzzle
    queen rabbit radio rain rainbow ribbon rice ring river road robin robot rocket roof room
    rose salt sand school sea sheep shell ship shirt shoe silver snake snow sofa spider spring
    star stone storm street sugar summer sun table tiger tomato tooth town train tree truck
    umbrella valley violin wall water whale wheat wind window winter wolf wood zebra
    """
)

NAMES: tuple[str, ...] = _words(
    """
    Ada Alan Alice Amir Anna Ben Bruno Carla Clara David Diego Elena Emma Eric Fatima Felix
    Grace Hana Hugo Ines Ivan Jane Jonas Julia Kofi Lara Leo Lena Maria Marco Mia Nina Noah
    Olga Omar Paul Priya Rosa Sam Sara Sofia Tara Theo Tom Vera Victor Wei Yuki Zoe
    """
)

CITIES: tuple[str, ...] = _words(
    """
    Accra Athens Berlin Bogota Boston Cairo Chicago Delhi Dublin Geneva Hanoi Havana Jakarta
    Kyoto Lagos Lima Lisbon London Madrid Miami Milan Nairobi Oslo Paris Prague Quito Rome
    Seoul Sydney Tokyo Toronto Tunis Vienna Warsaw Zurich
    """
)

COLORS: tuple[str, ...] = _words(
    """
    red blue green yellow purple pink brown black white gray violet beige turquoise
    """
)

WEEKDAYS: tuple[str, ...] = _words(
    """
    Monday Tuesday Wednesday Thursday Friday Saturday Sunday
    """
)

MONTHS: tuple[str, ...] = _words(
    """
    January February March April May June July August September October November December
    """
)

ONES: tuple[str, ...] = _words(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen
    """
)

TENS: tuple[str, ...] = _words(
    """
    zero ten twenty thirty forty fifty sixty seventy eighty ninety
    """
)
