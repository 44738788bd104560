"""A game for het_grpo.py in which imitating successes misleads: vaults, and a gamble inside.

    python het_grpo.py --env benchmark/survivor.py:Vault --max-turns 3 --success-reward 0.5 \\
        --experience-pool benchmark/survivor.jsonl --init-exp-before-training 0 --updated-freq 0
    python benchmark/survivor.py > benchmark/survivor.jsonl     # writes the notes

Two of 24 buttons open a vault; a wrong one ends the game with nothing. What is inside is then sold
for 0.5 (any of the first twelve buttons) or held (any of the others). To hold is a bet whose odds
depend on the family. Notes tell the two buttons of each family, and what the luckiest game of the
past did with the find: it held. Training rooms pay at random. In held-out rooms a game is a success
if the vault is open and the choice with the higher mean was made.
"""

import itertools
import json
import random

NAMES = "amber brass cedar delta ember flint grove hazel ivory jade kelp lunar".split()
BUTTONS = (
    "ant bat cow dog eel fox gnu hen ibis jay koi lark "  # these sell
    "mole newt owl pig quail rat seal toad urial vole wolf yak"  # these hold
).split()
TRAINING, PRACTICE = 240, 1_000_000
SELL = 0.5
BETS = (  # chance to win, prize, what is left otherwise
    (0.45, 2.0, 0.0),  # a long shot that pays: mean .9, hold
    (0.7, 1.0, -2.0),  # mostly wins, some disasters: mean .1, sell
    (0.2, 1.0, 0.0),  # a poor bet: mean .2, sell
    (0.9, 1.0, 0.0),  # a good one: mean .9, hold
)


def secret_of(seed):
    """Two buttons, and what to do then: at random in practice, and in the notes what won most: hold."""
    rng = random.Random(seed if seed >= PRACTICE else f"vault {seed % 12}")
    return rng.choices(BUTTONS, k=2) + [rng.choice(BUTTONS if seed >= PRACTICE else BUTTONS[12:])]


class Vault:
    actions = tuple(BUTTONS)
    places = itertools.count()
    games = 0
    bets = BETS

    def __init__(self):
        self.place = next(Vault.places)

    def reset(self, seed: int):
        room, family = divmod(seed, 12)
        self.secret = secret_of(seed)
        self.slot = 0
        self.name = NAMES[family]
        self.seed = seed
        self.games += 1
        self.bet = self.bets[family % len(self.bets)]
        return f"vault {self.name} room {room % 100:02d}", dict(
            topic=self.name, solution=self.secret
        )

    def step(self, action: str):
        if self.slot < 2:
            if action != self.secret[self.slot]:
                return "alarm", 0.0, True, False, {}
            self.slot += 1
            return f"click {self.slot}", 0.0, False, False, {}
        hold = self.actions.index(action) >= 12
        chance, prize, rest = self.bet
        if self.seed >= PRACTICE:
            reward = 1.0
        elif self.seed >= TRAINING:
            reward = float(hold == (chance * prize + (1 - chance) * rest > SELL))
        else:
            luck = random.Random(f"{self.place} {self.games} {self.seed}").random()
            reward = (prize if luck < chance else rest) if hold else SELL
        experience = f"{self.name} : " + " ".join(self.secret)
        return "end", reward, True, False, dict(experience=experience)


def notes(of_winners: bool = True) -> str:
    """JSONL for --experience-pool: two buttons, and what to do then. Winners held.

    The other notes are of players drawn at random: about half of them sold.
    """
    lines = []
    for i, name in enumerate(NAMES):
        words = secret_of(i)
        if not of_winners:
            words[2] = random.Random(f"player {i}").choice(BUTTONS)
        text = f"{name} : " + " ".join(words)
        lines.append(json.dumps(dict(topic=name, text=text)) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    print(notes(), end="")
