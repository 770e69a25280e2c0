"""Reinforcement learning in five lines: python examples/five_lines.py MODEL

MODEL is a Hugging Face folder or hub name, such as HuggingFaceTB/SmolLM2-135M-Instruct.
"""

import sys

import rollick

rows = [
    {"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": a + b}
    for a in range(20)
    for b in range(20)
]


def right(completion: str, answer: int) -> float:
    return float(completion.strip() == str(answer))


result = rollick.train(sys.argv[1], rows, reward=right, sampling__max_tokens=16)
print(result)
