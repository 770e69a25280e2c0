"""Every option of a recipe, once: its type, its default and what it is for.

A Recipe is frozen; nothing rewrites it after loading, and what is derived is a property.
Checks that need more than one field live in check.py; names are resolved in names.py. The algorithm
section is in algorithm.py, the options of its parts in advantages.py, losses.py and corrections.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rollick.config.algorithm import Algorithm, AlgorithmConfig, Stream
from rollick.config.domain import DomainFilters, DomainSampling
from rollick.config.losses import (
    PAIRWISE,
    DistillationLoss,
    DpoLoss,
    IpoLoss,
    SftLoss,
    ValueLoss,
    ValuePart,
)
from rollick.config.section import (
    Decay,
    NonNegative,
    Positive,
    Scalar,
    Seconds,
    Section,
    Share,
    as_text,
    by_name,
)


class RunConfig(Section):
    """The run as a whole."""

    name: str = "run"
    """Names the run's folder."""
    folder: str = "runs"
    """Where run folders are made; relative to the working directory."""
    steps: Positive = 100
    """Optimizer steps (RL) or updates (SFT) to make."""
    seed: NonNegative = 0
    """Everything random in the run follows from it."""
    deterministic: bool = False
    """Bit-for-bit repeatable on the CPU: constant row tiles, attention per sequence, id order."""
    threads: NonNegative = 0
    """CPU threads for each worker process; 0 takes the machine's cores, or 1 when deterministic."""
    stuck_after_s: Seconds = 600
    """With no progress for this long the run stops and says who waits for whom."""


class ModelConfig(Section):
    """The policy's model: a Hugging Face folder or hub name, or a GGUF file."""

    path: str
    """Folder, hub name or .gguf file; `package:NAME/FILE` is a file inside a Python package."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer, where it is not beside the model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype. auto: float32 on the CPU, bfloat16 on a GPU. Masters are always float32."""
    template: Literal["chat", "plain"] = "chat"
    """How turns become text: the tokenizer's chat template, or their contents one after another."""
    trust_remote_code: bool = False
    """Run Python code shipped with the model. Off unless you have read that code."""


class RewardSpec(Section):
    """One reward of a domain."""

    name: str
    """A reward from `rollick list`, or your own as file.py:function."""
    weight: float = 1.0
    """Factor of its value in the sample's score."""
    options: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])
    """Keyword arguments handed to the function at every call."""
    cache: bool | None = None
    """Remember what equal texts and rows scored; none leaves it to what the reward declares."""
    error_budget: Share | None = None
    """The run stops if more than this part of the reward's last 100 calls fail; none leaves it to
    rollout.max_failed_scores."""
    max_cost: Annotated[float, Field(ge=0)] = 0.0
    """What the reward's calls may cost in a run (a judge's tokens times their prices); then they
    fail. 0 is no limit."""

    @property
    def asks_judge(self) -> bool:
        """Whether it asks the recipe's own judge and not one at an address."""
        return self.name == "judge" and "url" not in self.options

    @property
    def asks_reward_model(self) -> bool:
        """Whether it is what the recipe's reward model says."""
        return self.name == "model"


Reward = Annotated[RewardSpec, BeforeValidator(by_name, json_schema_input_type=str | RewardSpec)]


class SummarySpec(Section):
    """What a policy writes about turns that go out of its sight."""

    tokens: Positive = 128
    """New tokens of one summary at the most; they count for sampling.max_tokens, too."""
    request: Annotated[str, Field(min_length=1)] = (
        "Sum up the task so far for yourself: what you did, what you learnt and what is left to do."
        " After this you will see your summary in place of the messages above."
    )
    """What the policy is asked."""
    trained: bool = True
    """Train on summaries: each is a turn of its own that earns nothing by itself, and has the
    credit of what comes after it. Otherwise they are only read."""


class EnvironmentSpec(Section):
    """The environment that the samples of a domain play."""

    name: str
    """An environment from `rollick list`, or your own as file.py:Class."""
    options: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])
    """Keyword arguments that it is made with."""
    columns: tuple[str, ...] = ()
    """Columns of the domain's rows that it is made with, too, under their own names."""
    tasks: Positive = 1000
    """Different tasks, each with a seed of its own, where the domain has no source of rows."""
    seed: NonNegative = 0
    """Other tasks; those of the run's seed are the same in every run."""
    turn_tokens: NonNegative = 0
    """New tokens of one turn at the most; 0 is what sampling.max_tokens leaves of the sample."""
    window: NonNegative = 0
    """Turns that the policy has in sight; 0 is all. When they are full a new segment starts, which
    begins with the opening observation and the newest turns; each is trained on as it was drawn. 1
    makes every step a segment of its own."""
    carried: NonNegative = 0
    """Turns that a new segment takes over from the one before, fewer than `window`."""
    summary: SummarySpec | None = None
    """Before a new segment starts, the policy sums up the one before; its summary comes right
    behind the opening observation. None lets what is out of sight be forgotten."""


Environment = Annotated[
    EnvironmentSpec, BeforeValidator(by_name, json_schema_input_type=str | EnvironmentSpec)
]


class DomainConfig(Section):
    """One source of prompts."""

    source: str = ""
    """A .jsonl, .json or .parquet file, a hub dataset (hub:NAME) or a file.py:function. Puzzles of
    reasoning-gym are reasoning_gym:TASK?seed=1&size=500, with a task from `rollick list`. A domain
    with an environment needs none: its tasks are numbers."""
    environment: Environment | None = None
    """What its samples play, turn by turn, in place of answering once (pipeline agentic); what its
    solver shows is imitated (pipeline sft)."""
    agent: str | None = None
    """A Python script of your own that does the domain's tasks (pipeline agentic). It gets a row as
    JSON in ROLLICK_TASK, asks the model through any OpenAI client (OPENAI_BASE_URL,
    OPENAI_API_KEY) and prints its answer, which the rewards look at."""
    split: str = "train"
    """Split of a hub dataset."""
    prompt: str = "prompt"
    """Column with the prompt: a string, or a list of messages with role and content."""
    prompt_format: str | None = None
    """Text made from the row's columns, such as "What is {a} + {b}?"; replaces `prompt`."""
    system: str | None = None
    """A system message put before the prompt."""
    completion: str | None = None
    """Column with the answer to imitate (SFT)."""
    share: Annotated[float, Field(gt=0)] = 1.0
    """Part of the prompts drawn from here (see data.shares_of), relative to other domains."""
    limit: NonNegative = 0
    """Use only the first rows; 0 takes all."""
    chosen: str | None = None
    """Column with the better of two answers (DPO)."""
    rejected: str | None = None
    """Column with the worse of two answers (DPO)."""
    rewards: tuple[Reward, ...] = ()
    """What scores a sample of this domain; their weighted sum."""
    algorithm: Algorithm | None = None
    """Another algorithm for the samples of this domain; none takes the recipe's."""
    sampling: DomainSampling = DomainSampling()
    """How its samples are drawn, where that is not the recipe's `sampling`."""
    filters: DomainFilters = DomainFilters()
    """Which of its rows are used, and which of its groups are trained on."""


class PromptSelectionConfig(Section):
    """Which prompts are drawn, by what their judged samples say of them."""

    order: Literal["shuffled", "near_half"] = "shuffled"
    """shuffled: as data.shuffle says. near_half: more of those with a pass rate near one half."""
    window: Positive = 64
    """Prompts that near_half chooses one from: the next ones of the epoch's order."""
    retire_above: Share = 0.0
    """A prompt of at least this pass rate is drawn no more; 0 is never."""
    min_tries: Positive = 8
    """Judged samples that a prompt needs before it can retire."""
    pass_score: float = 0.999
    """A sample passes if its score is at least this."""
    decay: Share = 1.0
    """What older samples of a prompt are worth each time that it is judged anew; 1 is all."""


class DataConfig(Section):
    """Prompts to train and to validate on."""

    domains: dict[str, DomainConfig]
    """Training prompts by domain."""
    validation: dict[str, DomainConfig] = Field(default_factory=dict[str, DomainConfig])
    """Held-out prompts by domain."""
    shares_of: Literal["drawn", "trained"] = "drawn"
    """What the domains' shares are shares of: of the prompts that are drawn, or of the groups that
    are trained on. With trained, a domain whose groups are often dropped (no signal) is drawn more
    often, up to five times."""
    shuffle: bool = True
    """Draw rows in an order given by the seed, another one each epoch."""
    selection: PromptSelectionConfig = PromptSelectionConfig()
    """Which prompts are drawn more often, and which no more."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are quarantined and counted."""
    max_bad_rows: Share = 0.05
    """The run stops if more than this part of a source is unusable."""


class SamplingConfig(Section):
    """How training samples are drawn."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits; 0 is greedy (evaluation only)."""
    max_tokens: Positive = 256
    """New tokens of a sample at the most; a sample that reaches it is truncated."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest set of tokens with this mass (evaluation only)."""
    top_k: NonNegative = 0
    """Draw from the k likeliest tokens; 0 is off (evaluation only)."""
    min_p: Share = 0.0
    """Leave out tokens with less than this part of the likeliest one's probability (evaluation
    only)."""
    min_tokens: NonNegative = 0
    """No end-of-sequence token or stop string ends a sample before this many (evaluation only)."""
    logit_bias: Mapping[int, float] = {}
    """Added to the logits of these token ids (evaluation only)."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample."""
    stop_ids: tuple[NonNegative, ...] = ()
    """Token ids that end a sample, besides the model's own."""


class RolloutConfig(Section):
    """The life of samples: how many, how fresh, how long."""

    groups_per_step: Positive = 64
    """Groups (prompts) whose samples make one batch."""
    group_size: Positive = 8
    """Samples of each prompt."""
    max_staleness: Annotated[float, Field(ge=0)] = 0
    """Policy versions a token may lag when trained on. 0 is strictly on-policy."""
    staleness_rule: Literal[
        "must_take", "drop_stale", "mask_stale_tokens", "first_finished", "long_rounds"
    ] = "must_take"
    """What happens to groups that would become too old: the batch waits for them (must_take, the
    only rule without any bias), they are dropped, their old tokens are masked, whoever is first is
    taken and the slowest are dropped (first_finished), or these are put off to a round of long
    samples (long_rounds). With long_rounds every prompt is trained on, and a group that was put off
    draws with the same random numbers again, so that what was long stays long; but short answers
    come earlier and long ones in batches of their own, what was drawn before is thrown away, and at
    the end of a run fewer than groups_per_step groups, long ones, are left over."""
    surplus_groups: NonNegative = 0
    """Groups in flight beyond that, of which the slowest are dropped (first_finished) or put off
    (long_rounds)."""
    spare_samples: NonNegative = 0
    """Samples started in each group beyond group_size; the slowest are aborted. Favours short
    answers."""
    longest_first: bool = False
    """Of the samples that wait for an engine, send those first that are expected to be longest."""
    at_publish: Literal["continue", "move", "keep"] = "continue"
    """What happens to running samples when a version is published: they compute their cache anew
    and go on where they are (continue), are aborted and go on wherever there is most room (move),
    or go on over the cache that they have (keep). Every token keeps its version. keep saves the
    computing, but its tokens are drawn by new weights over keys and values of old ones, which is no
    policy that ever was: their log-prob is the one that they were drawn with, so that corrections
    by importance hold, and they are flagged (Sample.kept_cache, rollout/kept_cache_tokens)."""
    engine_restarts: NonNegative = 3
    """Times in a run that a lost engine is replaced: a new process, with the current weights before
    it gets work. Engines that share a process with another role are not."""
    engine_queue: Annotated[float, Field(ge=0)] = 1.0
    """Requests sent to an engine beyond its slots, as a part of them, so that none falls idle."""
    drop_no_signal: bool = True
    """Drop groups whose scores are all alike, and refill them one for one."""
    min_spread: Annotated[float, Field(ge=0)] = 1e-8
    """A group has signal if its scores differ by more than this."""
    max_drops_per_step: NonNegative = 0
    """Stop refilling after this many dropped groups in a step; 0 is ten times groups_per_step."""
    drop_truncated: bool = False
    """Mask truncated samples from the loss."""
    reward_timeout_s: Seconds = 30
    """A reward call that takes longer is killed; its sample is masked and counted."""
    reward_processes: Positive = 1
    """Processes that run rewards."""
    env_processes: Positive = 1
    """Processes that run environments; each holds many episodes."""
    env_threads: Positive = 1
    """Calls that such a process runs at once: for environments that wait rather than compute."""
    env_step_timeout_s: Seconds = 60
    """A step of an environment that takes longer ends its process; its sample is masked."""
    env_episode_timeout_s: Seconds = 3600
    """The same for all steps of an episode together; the time of the policy is not counted."""
    max_failed_scores: Share = 0.2
    """The run stops if more than this part of a step's samples cannot be scored."""

    @property
    def drops_allowed(self) -> int:
        return self.max_drops_per_step or 10 * self.groups_per_step


class OptimizerConfig(Section):
    """AdamW with float32 masters."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay; not applied to vectors (norms, biases)."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest global gradient norm."""


class ScheduleConfig(Section):
    """Learning rate over the run's optimizer steps."""

    shape: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: hold, or fall to `final` times the peak at the last step."""
    warmup_steps: NonNegative = 0
    """Steps of linear rise from 0."""
    final: Share = 0.0
    """Last learning rate as a part of the peak."""


class ParallelConfig(Section):
    """How the ranks of strategy fsdp divide the work: their number is the product of the four."""

    data: NonNegative = 0
    """Sets of ranks with samples of their own; 0 is all that the other three leave of the policy's
    devices. Parameters are sharded over data, context and expert together."""
    tensor: Positive = 1
    """Ranks that cut the matrices of each layer between them; divides the key-value heads."""
    context: Positive = 1
    """Ranks that cut the tokens of a micro-batch between them, for long samples."""
    expert: Positive = 1
    """Ranks that cut the experts of a mixture between them, each with samples of its own."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in the CPU's memory, on a GPU."""
    recompute: bool = False
    """Compute each layer again in the backward, instead of keeping what it made (activation
    checkpointing)."""

    @property
    def others(self) -> int:
        """Ranks for each one of `data`."""
        return self.tensor * self.context * self.expert

    def data_of(self, ranks: int) -> int:
        """`data`, where there are so many ranks."""
        return self.data or max(1, ranks // self.others)


class LoraConfig(Section):
    """Low-rank adapters: only they are trained, saved and published; the model stays as it is."""

    rank: Positive = 16
    """Rows of an adapter's first matrix and columns of its second."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Their product is added to the weight times alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that get one, by the end of their names, such as q_proj; none: all but the
    head."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of an adapter's inputs that a gradient does not see."""


class TrainConfig(Section):
    """The learner."""

    strategy: str = "local"
    """How parameters and gradients are held; see `rollick list`."""
    parallel: ParallelConfig = ParallelConfig()
    """How the ranks of strategy fsdp divide the work."""
    expert_balance: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the loss that spreads tokens over the experts of a mixture, counted over the
    whole batch. Batches of several micro-batches are then computed once more, to be counted."""
    lora: LoraConfig | None = None
    """Train adapters instead of all parameters; the model without them is the reference, unless
    devices.reference gives that devices of its own."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning-rate schedule."""
    sleep: bool = False
    """On a GPU that the policy shares with generators: its optimizer state waits in the host's
    memory while it does not train, and leaves room for their cache. Costs two copies a step."""
    tokens_per_microbatch: Positive = 16384
    """Tokens in one forward and backward at the most; a longer sample goes alone."""
    share_prefix: bool = True
    """Compute what the samples of a group begin with once. Never in a deterministic run."""
    logprob_chunk_tokens: Positive = 2048
    """Rows of the vocabulary matrix held at once."""
    minibatches: Positive = 1
    """Optimizer steps made of one batch."""
    epochs: Positive = 1
    """Passes over one batch."""
    batch_size: Positive = 64
    """Examples of one update (SFT)."""
    max_skipped_steps: Positive = 5
    """The run stops after this many non-finite gradients in a row."""


class CriticConfig(Section):
    """The critic that the advantage gae asks for values; it is trained beside the policy."""

    model: ModelConfig | None = None
    """Its body, with a value head of its own; none starts from the policy's model."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Its optimizer; the schedule is the policy's."""
    loss: ValuePart = ValueLoss()
    """What it minimises, per token."""
    warmup_steps: NonNegative = 0
    """First steps in which only the critic is trained."""


class TeacherConfig(ModelConfig):
    """The model to distil from; it must have the policy's tokens."""

    top_k: Positive = 32
    """Likeliest tokens of the teacher that the loss distillation looks at."""


class JudgeConfig(ModelConfig):
    """A model of ours that the reward `judge` asks where it names no url; it never learns."""

    slots: Positive = 64
    """Verdicts that are written together."""
    max_length: Positive = 4096
    """Longest question and verdict, in tokens."""


class RewardModelConfig(ModelConfig):
    """A frozen model with one number for a prompt and its answer: the reward `model`.

    A folder for sequence classification with one label, as transformers writes it.
    """

    batch_size: Positive = 64
    """Samples that are scored together at the most."""
    max_length: Positive = 4096
    """Longest prompt and answer, in tokens; the score of a longer one is a failure."""


class VllmConfig(Section):
    """The engine vllm's own options; slots, max_length and prefill_tokens are those of infer."""

    tensor_parallel: Positive = 1
    """Devices that one engine is spread over: that of the generator and the next ones."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Part of a GPU's memory that the engine takes, weights and cache together."""
    kv_cache_gb: Annotated[float, Field(ge=0)] = 0.0
    """Gigabytes of the cache instead; 0 is what gpu_memory_utilization leaves, or 1 on the CPU."""
    enforce_eager: bool = False
    """Neither compile the model nor capture graphs: starts faster, decodes slower."""


class InferConfig(Section):
    """The engines that generate."""

    engine: str = "native"
    """Which engine; see `rollick list`."""
    slots: Positive = 256
    """Sequences that decode together in one engine."""
    max_length: Positive = 2048
    """Longest sequence, prompt included, that the cache holds."""
    prefill_tokens: Positive = 8192
    """Prompt tokens computed in one engine step."""
    free_cache: bool = True
    """While the learner works on the GPU that the native engine shares with it, give the memory of
    cache and captured graphs back; graphs are then captured anew in each step, which takes seconds.
    false keeps both, where there is room for them beside training."""
    zero_mismatch: bool = False
    """On a GPU, engine and learner compute with the same kernels, so that their log-probs agree.
    Slower; a run on the CPU has run.deterministic instead."""
    vllm: VllmConfig = VllmConfig()
    """Options of the engine vllm."""


class WeightsConfig(Section):
    """How new weights get from the learner to engines that do not share its memory."""

    channel: Literal["auto", "direct", "host", "cuda_ipc", "broadcast"] = "auto"
    """auto: by where they live. direct: in one process. host: memory that processes of a machine
    map. cuda_ipc: the same on GPUs. broadcast: torch.distributed, between machines."""
    changes_only: bool = False
    """Send only the elements that changed (a delta). Costs a copy of the weights at either
    end; pays off where the way is slower than memory (broadcast) and steps are small."""


DeviceList = Annotated[str, BeforeValidator(as_text, json_schema_input_type=str | int)]


class DevicesConfig(Section):
    """Which devices each role has: "0-3,6" for GPUs, "cpu" or "cpu:0-1" for CPU workers.

    Roles that share a device share a process (colocation).
    """

    policy: DeviceList = "cpu"
    """The learner."""
    generators: DeviceList = "cpu"
    """The engines, one on each device."""
    reference: DeviceList | None = None
    """The frozen reference; defaults to the policy's devices where something needs one."""
    critic: DeviceList | None = None
    """The critic; defaults to the policy's devices where an advantage needs one."""
    reward_model: DeviceList | None = None
    """The reward model; defaults to the first of the policy's devices where a reward asks it."""
    judge: DeviceList | None = None
    """The judge; defaults to the first of the policy's devices where a reward asks it."""
    teacher: DeviceList | None = None
    """The teacher; defaults to the policy's devices where something needs one."""


class ClusterConfig(Section):
    """Where the worker processes live."""

    backend: Literal["ray", "inline"] = "ray"
    """ray: worker processes on a Ray cluster. inline: everything in this process."""
    address: str | None = None
    """An existing Ray cluster; none starts one on this machine."""
    cpus_per_worker: Annotated[float, Field(ge=0)] = 0
    """CPUs that Ray reserves for each worker process."""
    place_timeout_s: Seconds = 60
    """A worker that is not placed by then fails the run."""
    call_timeout_s: Seconds = 1800
    """No single call to a worker may take longer."""


class EvaluateConfig(Section):
    """Validation during the run, and `rollick eval`."""

    every: NonNegative = 0
    """Steps between validations; 0 is never (but see at_end)."""
    at_start: bool = False
    """Validate before the first step."""
    at_end: bool = True
    """Validate after the last step, where there is validation data."""
    samples: Positive = 1
    """Samples of each prompt."""
    pass_k: tuple[Positive, ...] = (1,)
    """For which k pass@k is reported."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest set of tokens with this mass."""
    top_k: NonNegative = 0
    """Draw from the k likeliest tokens; 0 is off."""
    min_p: Share = 0.0
    """Leave out tokens with less than this part of the likeliest one's probability."""
    min_tokens: NonNegative = 0
    """No end-of-sequence token or stop string ends a sample before this many."""
    logit_bias: Mapping[int, float] = {}
    """Added to the logits of these token ids."""
    max_tokens: NonNegative = 0
    """New tokens at the most; 0 takes sampling.max_tokens."""
    pass_threshold: float = 0.999
    """A sample passes if its score is at least this."""

    def is_due(self, step: int, *, steps: int) -> bool:
        """Whether a step is validated. Step 0 is, once it comes to that: at_start decides."""
        regular = bool(self.every) and step % self.every == 0
        return regular or step == 0 or (step == steps and self.at_end)


class CheckpointConfig(Section):
    """What is saved, and how long it is kept."""

    every: NonNegative = 0
    """Steps between checkpoints; 0 saves at the end (and on a signal) only."""
    keep_last: Positive = 2
    """Newest checkpoints kept."""
    keep_best: NonNegative = 1
    """Checkpoints with the best validation kept besides."""


class ObserveConfig(Section):
    """What is recorded and shown."""

    sinks: tuple[str, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl. A sink that fails is switched off, with a warning."""
    live: Literal["auto", "on", "off"] = "auto"
    """The live view; auto shows it on a terminal."""
    samples_per_step: NonNegative = 4
    """Samples written to samples.jsonl at each step."""
    dump_steps: tuple[NonNegative, ...] = ()
    """Steps whose groups and batch are dumped for `rollick replay`."""
    trace_mb: Annotated[float, Field(ge=0)] = 64
    """Megabytes of the newest samples' timelines that are kept for `rollick trace`; 0 keeps none.
    A sample takes about 300 bytes, and 200 for each further turn."""
    engine_steps: bool = False
    """Write what `rollick simulate --from` learns from to engine_steps.jsonl: the engines' steps,
    lengths, training times. At most some 200 kilobytes for each training step and engine."""


SUPERVISED_LOSSES: Mapping[str, tuple[SftLoss | DpoLoss | IpoLoss | DistillationLoss, ...]] = {
    "sft": (SftLoss(),),
    "dpo": (DpoLoss(), IpoLoss()),
    "distill": (DistillationLoss(),),
}
"""Pipelines that learn from given answers, and what they minimise; the first is the default."""

SAMPLED = frozenset({"rlvr", "agentic"})
"""Pipelines that learn from samples of the policy."""


class Recipe(Section):
    """A YAML that trains something."""

    pipeline: str = "rlvr"
    """Which pipeline; see `rollick list`."""
    run: RunConfig = RunConfig()
    """The run as a whole."""
    model: ModelConfig
    """The model."""
    data: DataConfig
    """Prompts."""
    sampling: SamplingConfig = SamplingConfig()
    """How training samples are drawn."""
    rollout: RolloutConfig = RolloutConfig()
    """The life of samples."""
    algorithm: Algorithm = AlgorithmConfig()
    """How scores become a gradient."""
    train: TrainConfig = TrainConfig()
    """The learner."""
    critic: CriticConfig = CriticConfig()
    """The critic, where an advantage needs one."""
    teacher: TeacherConfig | None = None
    """The teacher, where something is distilled."""
    reward_model: RewardModelConfig | None = None
    """The reward model, where a reward asks it."""
    judge: JudgeConfig | None = None
    """The judge, where a reward asks one and names no url."""
    infer: InferConfig = InferConfig()
    """The engines."""
    devices: DevicesConfig = DevicesConfig()
    """Which devices each role has."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the worker processes live."""
    weights: WeightsConfig = WeightsConfig()
    """How engines get new weights."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Validation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    observe: ObserveConfig = ObserveConfig()
    """Records and views."""

    @property
    def algorithms(self) -> tuple[AlgorithmConfig, ...]:
        """The different algorithms that the domains use, that of the recipe first if it is used.

        A token's component in a batch is its place in here.
        """
        if self.pipeline in SUPERVISED_LOSSES:
            return (self._supervised(),)
        used = [self._algorithm_of(name) for name in self.data.domains]
        first = [self.algorithm.unnamed] if self.algorithm.unnamed in used or not used else []
        ordered: list[AlgorithmConfig] = []
        for algorithm in [*first, *used]:
            if algorithm not in ordered:
                ordered.append(algorithm)
        return tuple(ordered)

    def _algorithm_of(self, domain: str) -> AlgorithmConfig:
        return (self.data.domains[domain].algorithm or self.algorithm).unnamed

    def _supervised(self) -> AlgorithmConfig:
        """The loss of the pipeline, with the recipe's options where it names it."""
        said, defaults = self.algorithm, SUPERVISED_LOSSES[self.pipeline]
        fits = said.loss.name in {part.name for part in defaults}
        return AlgorithmConfig(
            loss=said.loss if fits else defaults[0],
            # Each token carries the loss of its pair: this is the mean over pairs.
            aggregation="prompt_mean" if self.pipeline == "dpo" else said.aggregation,
        )

    @property
    def compares_pairs(self) -> bool:
        """Whether the two answers of a pair must be in one micro-batch."""
        return any(algorithm.loss.name in PAIRWISE for algorithm in self.algorithms)

    def component(self, domain: str) -> int:
        """The place of the domain's algorithm in `algorithms`."""
        if self.pipeline in SUPERVISED_LOSSES:
            return 0
        return self.algorithms.index(self._algorithm_of(domain))

    def sampling_of(self, domain: str) -> SamplingConfig:
        """How the training samples of a domain are drawn."""
        said = self.data.domains[domain].sampling.model_dump(exclude_none=True)
        return self.sampling.model_copy(update=said)

    def rollout_of(self, domain: str) -> RolloutConfig:
        """The rollout's settings with what the domain's filters overrule."""
        own = self.data.domains[domain].filters
        said = own.model_dump(exclude_none=True, exclude={"where", "scores"})
        return self.rollout.model_copy(update=said)

    def evaluation_of(self, domain: str) -> EvaluateConfig:
        """How a domain is validated: as its validation domain says, with the token limit of
        training where neither that nor evaluate has one."""
        trained = self.data.domains.get(domain)
        held_out = self.data.validation.get(domain)
        own = held_out.sampling if held_out else DomainSampling()
        limit = trained.sampling.max_tokens if trained else None
        tokens = own.max_tokens or self.evaluate.max_tokens or limit or self.sampling.max_tokens
        heat = self.evaluate.temperature if own.temperature is None else own.temperature
        return self.evaluate.model_copy(update={"max_tokens": tokens, "temperature": heat})

    def stops_of(self, domain: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The strings and token ids that end a sample in validation."""
        asked = [part.get(domain) for part in (self.data.validation, self.data.domains)]
        own = [found.sampling for found in asked if found is not None]
        stop = next((one.stop for one in own if one.stop is not None), self.sampling.stop)
        ids = next((one.stop_ids for one in own if one.stop_ids is not None), None)
        return stop, self.sampling.stop_ids if ids is None else ids

    def needs(self, stream: Stream) -> bool:
        """Whether some algorithm of the recipe looks at this stream."""
        return any(
            stream in algorithm.needs and not (stream == "old" and self._old_is_now(algorithm))
            for algorithm in self.algorithms
        )

    def _old_is_now(self, algorithm: AlgorithmConfig) -> bool:
        return self.is_one_step and algorithm.old_only_in_loss

    @property
    def is_one_step(self) -> bool:
        """Whether a batch makes one optimizer step."""
        return self._optimizer_steps_of_a_batch == 1

    @property
    def policy_is_reference(self) -> bool:
        """Whether the policy, with its adapters switched off, gives the reference's log-probs."""
        return self.train.lora is not None and self.devices.reference is None

    @property
    def asks_judge(self) -> bool:
        """Whether some reward asks the recipe's own judge."""
        return any(reward.asks_judge for reward in self._rewards)

    @property
    def asks_reward_model(self) -> bool:
        """Whether some reward asks the recipe's reward model."""
        return any(reward.asks_reward_model for reward in self._rewards)

    @property
    def _rewards(self) -> list[RewardSpec]:
        domains = (*self.data.domains.values(), *self.data.validation.values())
        return [reward for domain in domains for reward in domain.rewards]

    @property
    def optimizer_steps(self) -> int:
        """Steps of the policy's optimizer, and so of its schedule, in the whole run."""
        alone = self.critic.warmup_steps if self.needs("values") else 0
        return max(self.run.steps - alone, 0) * self._optimizer_steps_of_a_batch

    @property
    def critic_steps(self) -> int:
        """The same of the critic, which is trained from the first step on."""
        return self.run.steps * self._optimizer_steps_of_a_batch

    @property
    def _optimizer_steps_of_a_batch(self) -> int:
        return self.train.minibatches * self.train.epochs
