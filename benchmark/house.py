"""A text game that a small pretrained model can play: find an item in a house, in two turns.

    python het_grpo.py --env benchmark/house.py:House --summarizer benchmark/house.py:reflect \\
        --model-name FOLDER --chat-template --max-turns 2 --max-turn-tokens 12

The game of docs/het_grpo.md, with the rooms of each task in an order of its own: no place in the list
is right. There are two tools: to search a room, or to ask the neighbor, who rules one room out. An
item is always in the same room, so a note about it helps.
"""

import random

ITEMS = ["lamp", "rope", "coin", "drum", "kite", "vase"]
ROOMS = ["kitchen", "garage", "attic", "cellar"]


def room_of(item: str) -> str:
    return random.Random(item).choice(ROOMS)


class House:
    actions = [*ROOMS, "neighbor"]

    def reset(self, seed: int):
        self.item = ITEMS[seed % len(ITEMS)]
        self.room = room_of(self.item)
        rooms = random.Random(f"order {seed}").sample(ROOMS, len(ROOMS))
        self.wrong_rooms = [room for room in rooms if room != self.room]
        question = f"Where is the {self.item}: {', '.join(rooms[:-1])} or {rooms[-1]}? "
        question += "You can also ask the neighbor. Answer with one word."
        return question, dict(topic=self.item)

    def step(self, action: str):
        if action == "neighbor" and self.wrong_rooms:
            return f"It is not in the {self.wrong_rooms.pop()}.", 0.0, False, False, {}
        if action != self.room:
            return f"You searched the {action} in vain.", 0.0, False, False, {}
        info = dict(experience=f"The {self.item} is in the {self.room}.")
        return "You found it.", 1.0, True, False, info


def reflect(episodes: list[dict], ask) -> list[tuple[str, str]]:
    """A summarizer: the policy itself is asked what it has learned from each episode."""
    question = "In one short sentence: what should be done next time?"
    prompts = [f"{e['text']}\nReward: {e['reward']}. {question}" for e in episodes[:16]]
    answers = ask(prompts, max_tokens=32)
    return [(e["topic"], answer) for e, answer in zip(episodes, answers, strict=False)]


def is_right(note: dict) -> bool:
    """Whether a note names the room of its item and no other room."""
    named = [room for room in ROOMS if room in note["text"].lower()]
    return named == [room_of(note["topic"])]
