"""Writes code in half of the episodes, without the modulus in half of these, and copies what it prints; else guesses."""

import re


def write(text, random):
    printed = re.search(r"<interpreter>\s*(\d+)\s*</interpreter>", text)
    if printed:
        return f"<answer> {printed[1]}</answer>" if len(printed[1]) < 4 else "<answer> 0</answer>"
    if random.random() < 0.5:
        return f"<answer> {random.randint(0, 106)}</answer>"
    power, modulus = re.findall(r"(\d+\*\*\d+) modulo (\d+)", text)[-1]
    return f"<code>{power} % {modulus}</code>" if random.random() < 0.5 else f"<code>{power}</code>"
