"""A text game of two turns for het_grpo.py and a pretrained model without a chat template.

    python het_grpo.py --env benchmark/doors.py:Doors --model-name FOLDER --max-turns 2

A door has two locks and four keys; a wrong key, or another word, ends the game. The six doors need different pairs. The
order in which a task names the keys is its own: no place in the list is right. What a success leaves in the pool
is the game as it was played: words that a language model is likely to go on with. The class lists no `actions`: with
them another word would cost a point, and the first thing learned would be to say some key, whatever the door.
"""

import random

PAIRS = dict(
    amber="gold green", cedar="red blue", flint="blue red", ivory="blue gold", pearl="green gold"
)
PAIRS["willow"] = "gold blue"
KEYS = ("red", "green", "blue", "gold")
FIRST, SECOND = "First, the key is", "Second, the key is"


def note(name: str, first: str, second: str) -> str:
    return f"The {name} door:\n{FIRST} {first}\n{SECOND} {second}"


def played(name: str) -> str:
    return note(name, *PAIRS[name].split())


class Doors:
    def reset(self, seed: int):
        self.name = list(PAIRS)[seed % len(PAIRS)]
        self.left = PAIRS[self.name].split()
        *keys, last = random.Random(seed).sample(KEYS, 4)
        question = f"The {self.name} door has two locks, and the keys are {', '.join(keys)} and {last}.\n{FIRST}"
        return question, dict(topic=self.name)

    def step(self, action: str):
        if action.strip().lower() != self.left.pop(0):
            return "The door is blocked.", 0.0, True, False, {}
        if self.left:
            return SECOND, 0.0, False, False, {}
        return "The door opens.", 1.0, True, False, dict(experience=played(self.name))
