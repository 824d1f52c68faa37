"""Takes a step towards the goal in half of the moves, any step in the others."""

import re

BEST = {
    0: "down",
    1: "right",
    2: "down",
    3: "left",
    4: "down",
    6: "down",
    8: "right",
    9: "down",
    10: "down",
    13: "right",
    14: "right",
}


def write(text, random):
    state = int(re.findall(r"(\d+)\s*<\|im_end\|>", text)[-1])
    best = BEST.get(state, "down")
    return f"Action: {best if random.random() < 0.5 else random.choice(['left', 'down', 'right', 'up'])}"
