"""FrozenLake in words, as an environment of one's own for het_grpo.py: hidden maps, and advice that names the way.

    python het_grpo.py --env benchmark/lake.py:Lake --max-turns 10

A task is a seed. Twelve families of tasks share twelve maps, which nobody is shown; seeds from a million on, where the
warm start practises, have maps of their own, so that it learns to read positions and advice and none of the twelve.
"""

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

NAMES = "amber brass cedar delta ember flint grove hazel ivory jade kelp lunar".split()


class Lake:
    actions = ("left", "down", "right", "up")

    def reset(self, seed: int):
        room, family = divmod(seed, 12)
        lake = generate_random_map(4, seed=seed if seed >= 1_000_000 else family)
        self.env = FrozenLakeEnv(desc=lake, is_slippery=False)
        self.env.reset(seed=seed)
        # the topic is one word: "lake" would match the advice for every lake
        return f"lake {NAMES[family]} room {room % 100:02d} row 0 column 0", dict(
            topic=NAMES[family]
        )

    def step(self, action: str):
        obs, reward, terminated, truncated, info = self.env.step(self.actions.index(action))
        return "row {} column {}".format(*divmod(int(obs), 4)), reward, terminated, truncated, info
