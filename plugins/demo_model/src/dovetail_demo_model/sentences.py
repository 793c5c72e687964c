"""The sentences of the embedding model: intents with slots, in many wordings.

Contract: a meaning is an intent with the values of its two slots. Several wordings state the same
intent, and two forms name the same value ("a sofa", "a couch"), so sentences of one meaning can
have few words in common. Wordings and meanings are held out from training independently. The
functions are pure, except for the draws from the given generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from operator import mul
from random import Random

from dovetail_demo_model.task import facts_are_held_out

HELD_OUT_SHARE = 5
"""One of 5 meanings is held out from training, in every wording."""
NUM_HELD_OUT_WORDINGS = 2
"""The last two wordings of each intent are held out from training, for every meaning."""

VALUES: dict[str, tuple[tuple[str, str], ...]] = {
    "person": (
        ("my mother", "my mum"),
        ("my father", "my dad"),
        ("the doctor", "the physician"),
        ("my boss", "my manager"),
        ("the teacher", "the instructor"),
        ("my wife", "my spouse"),
        ("my friend", "my buddy"),
        ("the lawyer", "the attorney"),
        ("my child", "my kid"),
        ("the author", "the writer"),
        ("my colleague", "my coworker"),
        ("the landlord", "the owner of the flat"),
    ),
    "item": (
        ("a car", "an automobile"),
        ("a sofa", "a couch"),
        ("a bicycle", "a bike"),
        ("a phone", "a mobile"),
        ("a laptop", "a notebook computer"),
        ("a television", "a TV"),
        ("a fridge", "a refrigerator"),
        ("a coat", "a jacket"),
        ("a cup", "a mug"),
        ("a photo", "a picture"),
        ("a hat", "a cap"),
        ("a boat", "a ship"),
        ("a rug", "a carpet"),
        ("a watch", "a clock"),
    ),
    "time": (
        ("at noon", "at midday"),
        ("at 8 am", "at eight in the morning"),
        ("at 3 pm", "at three in the afternoon"),
        ("at 9 pm", "at nine in the evening"),
        ("next week", "in seven days"),
        ("tonight", "this evening"),
        ("right now", "immediately"),
        ("in an hour", "in sixty minutes"),
        ("in half an hour", "in thirty minutes"),
        ("in a year", "in twelve months"),
        ("tomorrow", "the day after today"),
        ("on the weekend", "on Saturday or Sunday"),
    ),
    "place": (
        ("Paris", "the capital of France"),
        ("London", "the capital of England"),
        ("Rome", "the capital of Italy"),
        ("Berlin", "the capital of Germany"),
        ("Tokyo", "the capital of Japan"),
        ("Madrid", "the capital of Spain"),
        ("Vienna", "the capital of Austria"),
        ("Lisbon", "the capital of Portugal"),
        ("Athens", "the capital of Greece"),
        ("Cairo", "the capital of Egypt"),
        ("Oslo", "the capital of Norway"),
        ("Warsaw", "the capital of Poland"),
    ),
}
"""The values of each kind of slot, each with its two forms."""


@dataclass(frozen=True, kw_only=True)
class Intent:
    """An intent: its name, the kinds of its two slots, and its wordings, held-out ones last."""

    name: str
    slots: tuple[str, str]
    wordings: tuple[str, ...]


INTENTS = (
    Intent(
        name="call",
        slots=("person", "time"),
        wordings=(
            "Call {person} {time}.",
            "I want to phone {person} {time}.",
            "Give {person} a ring {time}.",
            "Please telephone {person} {time}.",
            "I have to ring up {person} {time}.",
            "Can you dial the number of {person} {time}?",
            "Remind me to give {person} a call {time}.",
            "Please ring {person} {time}.",
            "I have to phone {person} {time}.",
        ),
    ),
    Intent(
        name="message",
        slots=("person", "time"),
        wordings=(
            "Write to {person} {time}.",
            "Send {person} a message {time}.",
            "I want to send an email to {person} {time}.",
            "Text {person} {time}, please.",
            "I have to drop {person} a line {time}.",
            "Can you write a letter to {person} {time}?",
            "Remind me to email {person} {time}.",
            "Please send a letter to {person} {time}.",
            "I have to write an email to {person} {time}.",
        ),
    ),
    Intent(
        name="visit",
        slots=("person", "time"),
        wordings=(
            "Visit {person} {time}.",
            "I want to go and see {person} {time}.",
            "Drop by {person} {time}.",
            "Please make an appointment with {person} {time}.",
            "I have to meet {person} {time}.",
            "Can you arrange a meeting with {person} {time}?",
            "Remind me to go to see {person} {time}.",
            "Please arrange an appointment with {person} {time}.",
            "I want to meet with {person} {time}.",
        ),
    ),
    Intent(
        name="weather",
        slots=("place", "time"),
        wordings=(
            "What is the weather in {place} {time}?",
            "Will it rain in {place} {time}?",
            "Show me the forecast for {place} {time}.",
            "How warm is it going to be in {place} {time}?",
            "Do I need an umbrella in {place} {time}?",
            "Tell me the temperature in {place} {time}.",
            "Is it sunny or cold in {place} {time}?",
            "Tell me the weather forecast for {place} {time}.",
            "Is it going to rain in {place} {time}?",
        ),
    ),
    Intent(
        name="hotel",
        slots=("place", "time"),
        wordings=(
            "Book a room in {place} {time}.",
            "Find me a hotel in {place} {time}.",
            "I need a bed for the night in {place} {time}.",
            "Where can I sleep in {place} {time}?",
            "Reserve a hotel for us in {place} {time}.",
            "I want to stay overnight in {place} {time}.",
            "Is there a free hotel room in {place} {time}?",
            "I need a hotel room in {place} {time}.",
            "Where can I stay for the night in {place} {time}?",
        ),
    ),
    Intent(
        name="flight",
        slots=("place", "time"),
        wordings=(
            "Fly to {place} {time}.",
            "I need a plane ticket to {place} {time}.",
            "Find me a flight to {place} {time}.",
            "Is there a plane to {place} {time}?",
            "Which airline goes to {place} {time}?",
            "I want to travel by air to {place} {time}.",
            "Book a seat on a flight to {place} {time}.",
            "I want to fly by plane to {place} {time}.",
            "Is there a flight ticket to {place} {time}?",
        ),
    ),
    Intent(
        name="restaurant",
        slots=("place", "time"),
        wordings=(
            "Where can I eat in {place} {time}?",
            "Book a table for dinner in {place} {time}.",
            "Find me a restaurant in {place} {time}.",
            "I am hungry, so show me good food in {place} {time}.",
            "We want to dine in {place} {time}.",
            "Is there a good place for a meal in {place} {time}?",
            "Reserve a table for us in {place} {time}.",
            "I want to eat a good meal in {place} {time}.",
            "Is there a restaurant with a free table in {place} {time}?",
        ),
    ),
    Intent(
        name="buy",
        slots=("item", "place"),
        wordings=(
            "Where can I buy {item} in {place}?",
            "I want to purchase {item} in {place}.",
            "Which shop in {place} has {item}?",
            "I am looking for a store with {item} in {place}.",
            "Find me a place to get {item} in {place}.",
            "I would like to order {item} from a shop in {place}.",
            "Help me acquire {item} in {place}.",
            "Find me a store in {place} to buy {item}.",
            "Where can I purchase {item} in {place}?",
        ),
    ),
    Intent(
        name="sell",
        slots=("item", "place"),
        wordings=(
            "Where can I sell {item} in {place}?",
            "I offer {item} for sale in {place}.",
            "Who in {place} would pay for {item} of mine?",
            "I am looking for a buyer of {item} in {place}.",
            "I want to get rid of {item} in {place} for money.",
            "Help me turn {item} into cash in {place}.",
            "Put {item} on the market in {place}.",
            "I want to find a buyer for {item} in {place}.",
            "I would like to sell {item} of mine for cash in {place}.",
        ),
    ),
    Intent(
        name="rent",
        slots=("item", "place"),
        wordings=(
            "Where can I rent {item} in {place}?",
            "I want to hire {item} in {place}.",
            "Who in {place} would lend me {item}?",
            "I would like to borrow {item} in {place} for some days.",
            "Is there a rental service for {item} in {place}?",
            "Find me {item} on loan in {place}.",
            "Help me lease {item} in {place}.",
            "Where can I borrow {item} in {place}?",
            "I am looking for {item} for hire in {place}.",
        ),
    ),
    Intent(
        name="repair",
        slots=("item", "time"),
        wordings=(
            "Can you repair {item} {time}?",
            "I want to have {item} fixed {time}.",
            "I have {item} that is broken and must be restored {time}.",
            "Please fix {item} {time}.",
            "Who can restore {item} {time}?",
            "I have {item} that does not work and needs service {time}.",
            "Find somebody who makes {item} work again {time}.",
            "Who can fix {item} that is broken {time}?",
            "Please restore {item} that does not work {time}.",
        ),
    ),
    Intent(
        name="price",
        slots=("item", "time"),
        wordings=(
            "How much does {item} cost {time}?",
            "What is the price of {item} {time}?",
            "Is {item} cheap or expensive {time}?",
            "How many dollars is {item} worth {time}?",
            "Tell me what I have to pay for {item} {time}.",
            "Compare the costs of {item} {time}.",
            "Is there a discount on {item} {time}?",
            "Tell me the price of {item} {time}.",
            "How many dollars does {item} cost {time}?",
        ),
    ),
    Intent(
        name="thank",
        slots=("person", "item"),
        wordings=(
            "Thank {person} for {item}.",
            "Say thanks to {person} for {item}.",
            "I am grateful to {person} for {item}.",
            "I got {item} from {person} and appreciate it.",
            "It was kind of {person} to give me {item}.",
            "Express my gratitude to {person} for {item}.",
            "I am glad that {person} gave me {item}, so say thank you.",
            "I appreciate that {person} gave me {item}.",
            "Say thank you to {person} for {item} that I got.",
        ),
    ),
    Intent(
        name="lose",
        slots=("person", "item"),
        wordings=(
            "There is {item} that {person} lost.",
            "Somewhere {person} forgot {item}.",
            "Help {person} find {item} that is missing.",
            "Somebody stole {item} from {person}.",
            "It seems that {person} cannot find {item} any more.",
            "A thief took {item} from {person}.",
            "I report that {item} of {person} has disappeared.",
            "I report that {person} lost {item}.",
            "There is {item} missing that {person} cannot find.",
        ),
    ),
    Intent(
        name="live",
        slots=("person", "place"),
        wordings=(
            "The home of {person} is in {place}.",
            "It is in {place} that {person} lives.",
            "I know that {person} has a house in {place}.",
            "The address of {person} is in {place}.",
            "You find the flat of {person} in {place}.",
            "I think {person} resides in {place}.",
            "It is true that {person} moved to {place}.",
            "I know that {person} lives in {place}.",
            "The flat of {person} is in {place}.",
        ),
    ),
    Intent(
        name="work",
        slots=("person", "place"),
        wordings=(
            "The office of {person} is in {place}.",
            "It is in {place} that {person} works.",
            "I know that {person} has a job in {place}.",
            "The company that pays {person} is in {place}.",
            "You find the workplace of {person} in {place}.",
            "I think {person} is employed in {place}.",
            "It is true that {person} earns money in {place}.",
            "I know that {person} works in {place}.",
            "The job of {person} is in {place}.",
        ),
    ),
)

Meaning = tuple[Intent, int, int]
"""An intent and the indices of the values of its slots."""


def meanings(*, held_out: bool) -> list[Meaning]:
    """Return the meanings that are held out from training, or all others, in a fixed order."""
    return [
        (intent, first, second)
        for intent in INTENTS
        for first, second in product(*(range(len(VALUES[slot])) for slot in intent.slots))
        if facts_are_held_out(intent.name, (first, second), share=HELD_OUT_SHARE) == held_out
    ]


def draw_pair(rng: Random, meaning: Meaning, *, held_out: bool) -> tuple[str, str]:
    """Draw two sentences of a meaning, with different wordings.

    held_out: if True, use held-out wordings, and different forms of both values. If False, use
    wordings for training, and draw all forms independently.
    """
    intent, *indices = meaning
    split = len(intent.wordings) - NUM_HELD_OUT_WORDINGS
    wordings = rng.sample(intent.wordings[split:] if held_out else intent.wordings[:split], 2)
    forms = [[rng.randrange(2), rng.randrange(2)] for _ in indices]
    if held_out:
        forms = [[first, 1 - first] for first, _ in forms]
    first, second = (
        wording.format_map(
            {
                slot: VALUES[slot][index][form[position]]
                for slot, index, form in zip(intent.slots, indices, forms, strict=True)
            }
        )
        for position, wording in enumerate(wordings)
    )
    return first, second


def held_out_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Return pairs of sentences of `count` different held-out meanings, in held-out wordings."""
    rng = Random(f"sentences:{seed}")
    selected = rng.sample(meanings(held_out=True), count)
    return [draw_pair(rng, meaning, held_out=True) for meaning in selected]


def pair_accuracy(vectors: Sequence[Sequence[float]]) -> float:
    """Return the share of vectors whose nearest neighbor is the other vector of their pair.

    vectors: normalized; the two vectors of a pair are adjacent. The nearest neighbor of a vector is
    the other vector with the largest dot product.
    """
    num_right = 0
    for index, vector in enumerate(vectors):
        similarities = [sum(map(mul, vector, other)) for other in vectors]
        similarities[index] = -2.0
        num_right += similarities.index(max(similarities)) == index ^ 1
    return num_right / len(vectors)
