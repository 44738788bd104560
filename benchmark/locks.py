"""Locks whose successes mislead, for het_grpo.py: games in which imitating what worked ought to be wrong.

    python het_grpo.py --env benchmark/locks.py:Lucky     # a jam opens the lock in 2 of 100 cases
    python het_grpo.py --env benchmark/locks.py:Luckier   # in 4 of 100
    python het_grpo.py --env benchmark/locks.py:Told      # in 8 of 100, and advice is made of no lucky game
    python het_grpo.py --env benchmark/locks.py:Worn --max-turns 5    # the last press may be wrong in half of the cases
    python het_grpo.py --env benchmark/locks.py:Noisy     # the verdict is wrong in 10 of 100 games
    python het_grpo.py --env benchmark/locks.py:Noisier   # in 20 of 100

Luck and wrong verdicts are for training rooms only: validation asks for the secret. What a lucky game pressed becomes
advice, like what any other success pressed; in Told it does not, as if somebody who knows locks had read the game.
"""

import itertools
import random

NAMES = "amber brass cedar delta ember flint grove hazel ivory jade kelp lunar".split()
TRAINING, PRACTICE = (
    240,
    1_000_000,
)  # tasks below are for training; those from PRACTICE on have secrets of their own


class Lucky:
    actions = ("red", "green", "blue", "gold")

    games = 0  # luck differs from game to game; a resumed run counts anew

    def reset(self, seed: int):
        room, family = divmod(seed, 12)
        rules = random.Random(seed if seed >= PRACTICE else f"lock {family}")
        self.secret, self.slot, self.name = rules.choices(self.actions, k=4), 0, NAMES[family]
        self.training, self.games, self.history = seed < TRAINING, self.games + 1, f"{seed}"
        return f"lock {self.name} room {room % 100:02d}", dict(
            topic=self.name, solution=self.secret
        )

    def luck(self) -> float:
        """Chance that a wrong press opens the lock."""
        return 0.02

    def step(self, action: str):
        wrong, self.history = action != self.secret[self.slot], f"{self.history} {action}"
        chance = random.Random(f"{self.games} {self.history}").random()
        if wrong and not (self.training and chance < self.luck()):
            return f"jam {self.slot}", 0.0, False, False, {}
        pressed = [*self.secret[: self.slot], action]
        self.slot += 1
        if self.slot < 4 and not wrong:
            return f"click {self.slot}", 0.0, False, False, {}
        return "open", 1.0, True, False, dict(experience=self.advice(pressed, wrong))

    def advice(self, pressed: list[str], lucky: bool) -> str:
        return f"{self.name} : " + " ".join(pressed)


class Luckier(Lucky):
    def luck(self) -> float:
        return 0.04


class Told(Lucky):
    def luck(self) -> float:
        return 0.08

    def advice(self, pressed: list[str], lucky: bool) -> str:
        return "" if lucky else super().advice(pressed, lucky)


class Worn(Lucky):
    def luck(self) -> float:
        return 0.5 if self.slot == 3 else 0.0


class Noisy(Lucky):
    """Seven presses, then a judge who errs: some open locks count for nothing, some closed ones for a success."""

    wrong_verdicts, turns = 0.1, 7
    places = (
        itertools.count()
    )  # an environment of a batch has its own errors, and others in every game

    def __init__(self):
        self.place = next(Noisy.places)

    def luck(self) -> float:
        return 0.0

    def reset(self, seed: int):
        result = super().reset(seed)
        self.presses, chance = (
            0,
            random.Random(f"verdict {seed} {self.place} {self.games}").random(),
        )
        self.errs = self.training and chance < self.wrong_verdicts
        return result

    def step(self, action: str):
        pressed = [*self.secret[: self.slot], action]
        text, opened, ended, *rest = super().step(action)
        self.presses += 1
        if not ended and self.presses < self.turns:
            return text, opened, ended, *rest
        # a closed lock ends here, too: only a game that has ended can be a success
        return (
            text,
            float(bool(opened) != self.errs),
            True,
            False,
            dict(experience=self.advice(pressed, not opened)),
        )


class Noisier(Noisy):
    wrong_verdicts = 0.2
