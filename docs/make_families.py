"""Write docs/models.md, the table of model families: python docs/make_families.py.

    tests/family_verdicts.py --> results/families.json --> models.md

Do not edit the page; a test checks that it is current.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from make_reference import table

DOCS = Path(__file__).parent

COLUMNS: Mapping[str, str] = {
    "learner": "learner",
    "cpu_engine": "CPU engine",
    "gpu_engine": "GPU engine",
    "vllm": "vLLM",
    "direct": "direct forward",
}
"""The keys of results/families.json and the headings of their columns."""

NOT_RUN = ["not yet run", ""]

INTRODUCTION = """# Models

This page shows which model families the learner and the native engine compute exactly. Find your
model's `model_type` (in its `config.json`) in the table:

```yaml
model: {path: Qwen/Qwen3-0.6B}     # model_type qwen3: exact everywhere
```

- **exact**: log-probs (and the learner's gradients) equal those of transformers' own forward, one
  sequence at a time.
- **refused**: loading it raises an error with the reason. Nothing is sampled or trained.

A family that is not in the table is tried when it is loaded: engine and learner compare 16 tokens
with the model's own forward, in one pack and by prefill and decode, and refuse the model if
anything differs. Most families in the table are probed too. Only families whose settings cannot
change their attention (`EXACT_FAMILIES` in `rollick/models/loading/probe.py`) load without a probe;
of these, the logits are compared if `config.json` has a key that scales or caps them.

| column | meaning |
|---|---|
| learner | training and log-probs on packed sequences with shared prefixes |
| CPU engine | the native engine on the CPU |
| GPU engine | the native engine on a GPU |
| vLLM | whether vLLM's registry lists the architecture; its log-probs were not compared |
| direct forward | the faster forward that computes a decoder without its modules |

Every verdict is measured on a tiny, randomly initialised model of the family
(`tests/family_verdicts.py`); sliding windows, soft caps, sinks, experts and scaled logits are
switched on where a family has them.

**Rotary embeddings that depend on the length** (`longrope` as in Phi-3 and Phi-4-mini, `dynamic`):
the frequencies are those that the model's own code has for a sequence of `infer.max_length` tokens,
for all samples. A sample's log-probs then do not depend on its neighbours. With `infer.max_length`
at most the model's `original_max_position_embeddings`, these are the short factors. The learner
refuses samples longer than `infer.max_length` of such a model. vLLM chooses in the same way for
`longrope`; for `dynamic` it has the frequencies of `factor` times `max_position_embeddings` tokens.

**Sliding windows** count only if they are shorter than `infer.max_length`. `qwen2_moe` with
`use_sliding_window` is refused in this case: its layers do not pass the window to our attention.

## Families

"""


def refusals(columns: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(who refuses the family, why); equal reasons are one row."""
    parts: dict[str, list[str]] = {}
    for key, heading in COLUMNS.items():
        result, detail = columns.get(key, NOT_RUN)
        if result == "refused":
            reason = detail.rpartition("exactly: ")[2].removeprefix("cannot load the model: ")
            parts.setdefault(reason, []).append(heading)
    return [(", ".join(headings), reason) for reason, headings in parts.items()]


def page() -> str:
    results: dict[str, Any] = json.loads((DOCS / "results" / "families.json").read_text("utf-8"))
    rows = [
        (f"`{family}`", *(columns.get(key, NOT_RUN)[0] for key in COLUMNS))
        for family, columns in results.items()
    ]
    reasons = [(f"`{family}`", *row) for family in results for row in refusals(results[family])]
    header = ("family", *COLUMNS.values())
    return (
        f"{INTRODUCTION}{table(header, rows)}\n## Reasons\n\n"
        f"{table(('family', 'refused by', 'reason'), reasons)}"
    )


if __name__ == "__main__":
    (DOCS / "models.md").write_text(page(), "utf-8")
