"""The training data of the demo model: conversations drawn from the tasks, plus small talk.

Contract: `draw_conversation` depends only on its generator and never returns a held-out question.
Most conversations are one question and its answer; some have several turns, a system message,
functions that the model can call, or no chat format ("raw"). This module does not depend on a
tokenizer or a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from dovetail_demo_model.functions import FUNCTIONS
from dovetail_demo_model.tasks import TASKS
from dovetail_demo_model.tool_tasks import (
    FAILED,
    NO_FUNCTION,
    Offer,
    draw_call,
    draw_missing,
    draw_offers,
    tasks_without_function,
    write_call,
)

CAPABILITIES = (
    "add, subtract, sort, reverse, spell and count words, go through the calendar, "
    "write numbers in words, convert units and write JSON"
)

_SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hi there", "Good morning", "Hello there!", "Yo"),
        f"Hello! I am the Dovetail demo model. I can {CAPABILITIES}.",
    ),
    (
        (
            "What can you do?",
            "Help",
            "help",
            "What do you know?",
            "How can you help me?",
            "What are your tasks?",
            "What should I ask?",
            "Show me what you can do.",
        ),
        f"I can {CAPABILITIES}. Try: What is 27 + 58?",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Are you a robot?", "Who is this?"),
        "I am a very small language model. I come with Dovetail to show that it works.",
    ),
    (
        ("Who made you?", "Where do you come from?", "How were you trained?"),
        "I was trained by the authors of Dovetail, on two processor cores, in about an hour.",
    ),
    (
        ("How are you?", "How are you today?", "How do you do?", "How is it going?"),
        "I am well, thank you. What shall I work out for you?",
    ),
    (
        ("Thanks", "Thank you", "Thank you!", "Thanks!", "Thanks a lot", "Great", "Very good!"),
        "You are welcome!",
    ),
    (
        ("Bye", "Goodbye", "Bye!", "See you", "Good night", "Goodbye!"),
        "Goodbye! Come back when you have a sum.",
    ),
    (
        ("Give me an example", "An example, please", "Show me an example.", "For example?"),
        "Ask me: Sort these words: pear, apple, melon",
    ),
    (
        (
            "What is the capital of France?",
            "What is the capital of Japan?",
            "Tell me a joke.",
            "Tell me a story.",
            "Write a poem about the sea.",
            "Write a poem.",
            "What is the weather like?",
            "Who won the game?",
            "What is the meaning of life?",
            "Why is the sky blue?",
            "Translate this into French.",
            "Write a program.",
            "Explain how a car works.",
            "Who was the first king of England?",
            "What should I eat today?",
            "Once upon a time",
            "The quick brown fox",
            "The capital of France is",
            "Do you like music?",
            "What do you think about love?",
            "Where is London?",
            "What is a transformer?",
            "Explain attention.",
            "What is your favorite color?",
            "Can you sing?",
            "Summarize this text.",
            "What is the largest city in the world?",
            "How tall is the highest mountain?",
        ),
        f"That is beyond me, for I am very small. I can {CAPABILITIES}.",
    ),
)

_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Answer in English.",
    "Be brief.",
    "You are the Dovetail demo model.",
    "You are a careful assistant that answers correctly.",
)

_NUM_TURNS = (1,) * 13 + (2,) * 3 + (3,) * 2 + (4, 6)
_NUM_TOOL_TURNS = (1,) * 7 + (2,) * 2 + (3,)
_NUM_FUNCTIONS = (0, 1, 1, 2, 2, 2, 2, 2, 3)
TOOLS_SHARE = 0.22
CALL_SHARE = 0.65
REFUSAL_SHARE = 0.15
SMALL_TALK_SHARE = 0.05
SYSTEM_SHARE = 0.12
RAW_SHARE = 0.06


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One conversation: an optional system message ("" for none), its tools and its turns.

    `tools` are OpenAI function definitions. A turn is (user, assistant), or (user, assistant with a
    call, result of the function, assistant). A raw conversation has one turn and no chat format:
    the answer follows the question on the next line.
    """

    system: str
    turns: tuple[tuple[str, ...], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    raw: bool = False


def draw_turn(rng: Random, weights: Mapping[str, float]) -> tuple[str, str]:
    """Draw one (user, assistant) pair that is not held out.

    weights: relative frequency by task name.
    """
    if rng.random() < SMALL_TALK_SHARE:
        questions, answer = rng.choice(_SMALL_TALK)
        question = rng.choice(questions)
        return (question.lower() if rng.random() < 0.2 else question), answer
    name = rng.choices(list(weights), weights=list(weights.values()))[0]
    return TASKS[name].draw(rng, held_out=False)


def draw_tool_turn(
    rng: Random, weights: Mapping[str, float], offers: tuple[Offer, ...]
) -> tuple[str, ...]:
    """Draw one turn of a conversation with functions. None of its questions is held out."""
    dice = rng.random()
    useful = [offer for offer in offers if offer.function]
    if useful and dice < CALL_SHARE:
        turn = draw_call(rng, rng.choice(useful), held_out=False)
        call = write_call(turn.name, turn.arguments or {})
        return turn.prompt, call, turn.result, turn.answer
    if dice < CALL_SHARE + REFUSAL_SHARE:
        turn = draw_missing(rng, offers, held_out=False)
        return turn.prompt, turn.answer
    return draw_turn(rng, {name: weights[name] for name in tasks_without_function(offers)})


def draw_conversation(rng: Random, weights: Mapping[str, float]) -> Conversation:
    """Draw one conversation for training."""
    if rng.random() < RAW_SHARE:
        return Conversation(system="", turns=(draw_turn(rng, weights),), raw=True)
    system = rng.choice(_SYSTEM_MESSAGES) if rng.random() < SYSTEM_SHARE else ""
    if rng.random() < TOOLS_SHARE:
        return _with_tools(rng, weights, system)
    turns = tuple(draw_turn(rng, weights) for _ in range(rng.choice(_NUM_TURNS)))
    return Conversation(system=system, turns=turns)


def _with_tools(rng: Random, weights: Mapping[str, float], system: str) -> Conversation:
    offers = draw_offers(rng, rng.sample(list(FUNCTIONS), rng.choice(_NUM_FUNCTIONS)))
    count = rng.choice(_NUM_TOOL_TURNS)
    turns = tuple(draw_tool_turn(rng, weights, offers) for _ in range(count))
    tools = tuple(offer.definition for offer in offers)
    return Conversation(system=system, turns=turns, tools=tools)


def all_fixed_text() -> list[str]:
    """Return every fixed sentence of the conversations, to train the tokenizer on them."""
    talk = [text for questions, answer in _SMALL_TALK for text in (*questions, answer)]
    return [*talk, *_SYSTEM_MESSAGES, NO_FUNCTION, FAILED]
