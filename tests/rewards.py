"""A reward that random answers score on, so that tiny runs have a gradient."""


def digits(prompts, responses, answers):
    return [sum(c in "13579" for c in r) - 0.5 * sum(c.isalpha() for c in r) for r in responses]
