"""The tiny model of the game recipes: random weights, one token for each letter and each move.

python recipes/tiny_games.py runs/tiny_games
"""

import sys
from pathlib import Path

from rollick.testing.tiny import ALPHABET, save_tiny

WORDS = ("Up", "Down", "Left", "Right", "Nothing moved.", "That is no action.")
SIZES = {"hidden": 96, "layers": 3, "heads": 4, "kv_heads": 4, "max_length": 1024}


def save_model(folder: Path, seed: int = 0) -> Path:
    return save_tiny(folder, alphabet=[*ALPHABET, *WORDS, "#", "_", "√"], seed=seed, **SIZES)


if __name__ == "__main__":
    save_model(Path(sys.argv[1]))
