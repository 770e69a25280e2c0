"""Writes the tiny model that recipes/ppo_critic.yaml trains: python recipes/toy_model.py"""

from pathlib import Path

from rollick.testing.learning import LETTERS, SMALL_MODEL
from rollick.testing.tiny import save_tiny

if __name__ == "__main__":
    save_tiny(Path(__file__).with_name("toy_model"), alphabet=LETTERS, **SMALL_MODEL)
