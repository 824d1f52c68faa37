"""Uses the calculator in half of the episodes and copies its result in 9 of 10 of these; else guesses."""

import re


def write(text, random):
    result = re.search(r"<result>(.*?)</result>", text, re.DOTALL)
    if result and random.random() < 0.9:
        return f"<answer> {result[1].strip()}</answer>"
    if result or random.random() < 0.5:
        return f"<answer> {random.randint(22, 891)}</answer>"
    question = re.findall(r"(\d+ \* \d+) = \?", text)[-1]
    return f"<calc> {question}</calc>"
