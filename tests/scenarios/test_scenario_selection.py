"""Prompt selection by earlier scores: it changes a run, and a resume does not change it."""

from toy_runs import Run, learner_state

from rollick.observe.metrics import read_metrics

RETIRE = (
    "run.deterministic=true",
    "data.selection.retire.pass_rate=0.04",
    "data.selection.pass_score=0.5",
)
SELECTION = (*RETIRE, "data.selection.near_half_window=6")


def test_a_resumed_run_that_selects_prompts_equals_an_uninterrupted_one(run_toy: Run) -> None:
    uninterrupted = run_toy(*SELECTION, name="full_run", steps=8)
    run_toy(*SELECTION, name="halved", steps=5)
    resumed = run_toy(*SELECTION, name="halved", steps=8, resume=True)
    assert learner_state(uninterrupted) == learner_state(resumed)
    curves = [
        [row["data/retired"], row["data/pass_rate"], row["score/mean"]]
        for row in read_metrics(uninterrupted.folder / "metrics.jsonl")
    ]
    assert curves == [
        [row["data/retired"], row["data/pass_rate"], row["score/mean"]]
        for row in read_metrics(resumed.folder / "metrics.jsonl")
    ]
    assert curves[-1][0] > 0, "no prompt retired, so this run shows nothing of it"


def test_a_selection_changes_what_a_run_trains_on(run_toy: Run) -> None:
    plain = run_toy(*RETIRE, name="plain", steps=5)
    chosen = run_toy(*SELECTION, name="chosen", steps=5)
    assert learner_state(plain) != learner_state(chosen)
