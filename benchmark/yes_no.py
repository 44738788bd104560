"""A text environment small enough for a real model on a CPU: questions whose answer is yes, two turns to say so.

cd benchmark && python ../het_grpo.py --env yes_no:YesNo --model-name FOLDER --chat-template  (see the README)
"""

import gymnasium as gym

QUESTIONS = ["Is the sky blue?", "Is fire hot?", "Is snow cold?", "Do birds fly?"]


class YesNo(gym.Env):
    observation_space = gym.spaces.Text(200)
    action_space = gym.spaces.Text(200)

    def reset(self, seed=None, options=None):
        return QUESTIONS[seed % 4] + " Answer with one word, yes or no.", {}

    def step(self, action):
        right = "yes" in action.lower()
        return "Wrong. Answer again, with one word.", float(right), right, False, {}
