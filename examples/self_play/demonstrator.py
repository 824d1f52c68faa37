"""Moves to a free cell at random."""


def write(text, random):
    board = text.rpartition(": ")[2].partition("<|im_end|>")[0]
    return random.choice([cell for cell in board.strip().split("|") if cell.isdigit()])
