"""The learner (strategy, optimizer, schedule, adapters, batches), and the models of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollick.config.schema.losses import ValueLoss, ValuePart
from rollick.config.schema.section import Decay, IgnoredWith, NonNegative, Positive, Section, Share


class OptimizerConfig(Section):
    """AdamW with float32 master weights."""

    lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate. Default: 1e-6 for all parameters of the policy, 1e-5 for its adapters
    (train.lora) and for the critic."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay; not applied to vectors (norms, biases)."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest global gradient norm."""


class ScheduleConfig(Section):
    """Learning rate over the run's optimizer steps."""

    shape: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or falling to `final` times the peak at the last step."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up from 0."""
    final: Annotated[Share, IgnoredWith("shape", ("constant",))] = 0.0
    """Last learning rate as a fraction of the peak."""


class ParallelConfig(Section):
    """How ranks divide a model and its batches; their number is the product of the sizes."""

    data: NonNegative = 0
    """Data-parallel groups of ranks; 0: as many as the role's devices allow.
    Parameters are sharded over data, context and expert together."""
    tensor: Positive = 1
    """Ranks that split the matrices of each layer; must divide the key-value heads."""
    context: Positive = 1
    """Ranks that split the tokens of a micro-batch, for long samples."""
    expert: Positive = 1
    """Ranks that split the experts of a mixture; each has different samples."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state of a GPU in host memory."""
    recompute: bool = False
    """Recompute each layer in the backward instead of keeping its activations (activation
    checkpointing)."""

    @property
    def non_data_ranks(self) -> int:
        """The product of the other sizes: ranks for each one of `data`."""
        return self.tensor * self.context * self.expert

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that compute the same samples together."""
        return self.tensor * self.context

    def data_of(self, ranks: int) -> int:
        """The value of `data` for this number of ranks."""
        return self.data or max(1, ranks // self.non_data_ranks)


class LoraConfig(Section):
    """Low-rank adapters. Only they are trained, saved and published."""

    rank: Positive = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter's product is added to the weight times alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers with adapters, by the end of their names, such as q_proj; empty: all except
    the head."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of an adapter's inputs."""


class TrainConfig(Section):
    """The learner."""

    strategy: str = "local"
    """How parameters and gradients are stored; see `rollick list`."""
    parallel: Annotated[ParallelConfig, IgnoredWith("strategy", ("local",))] = ParallelConfig()
    """How the ranks of strategy fsdp divide the work."""
    expert_balance: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the loss that balances tokens over the experts of a mixture, over the global
    batch. Batches of several micro-batches then need one more forward, to count tokens."""
    lora: LoraConfig | None = None
    """Train adapters instead of all parameters. The model without them is the reference, unless
    devices.reference is set."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning-rate schedule."""
    sleep: bool = False
    """Keep the optimizer state in host memory while the policy does not train, on a GPU that it
    shares with generators. Frees memory for their KV cache; costs two copies a step."""
    tokens_per_microbatch: Positive = 16384
    """Maximum tokens of one forward and backward; a longer sample is a separate micro-batch."""
    share_prefix: bool = True
    """Compute the common prefix of a group's samples once. Never in a deterministic run."""
    logprob_chunk_tokens: Positive = 2048
    """Tokens with logits in memory at the same time."""
    minibatches: Positive = 1
    """Optimizer steps per pass over a batch."""
    epochs: Positive = 1
    """Passes over each batch."""
    max_skipped_steps: Positive = 5
    """After this many steps in a row with a gradient that is not finite, an exploding gradient or a
    collapsed policy (see docs/reliability.md), the run rolls back."""
    rollbacks: NonNegative = 2
    """How often a run may go back to the snapshot from before such steps; then they end it."""

    @property
    def peak_lr(self) -> float:
        """The policy's peak learning rate. Adapters need about ten times that of full training."""
        return self.optimizer.lr or (1e-6 if self.lora is None else 1e-5)

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps per batch."""
        return self.minibatches * self.epochs


class SupervisedTrainConfig(TrainConfig):
    """The learner of pipelines with given answers."""

    batch_size: Positive = 64
    """Examples, or pairs, of one step."""


class ModelConfig(Section):
    """The policy's model: a Hugging Face folder or hub name, or a GGUF file."""

    path: str
    """Folder, hub name or .gguf file; `package:NAME/FILE` is a file inside a Python package."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer, if it is not in the model's folder."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype. auto: float32 on the CPU, bfloat16 on a GPU. Master weights are always
    float32. float16 is for models that are not trained."""
    template: Literal["chat", "plain"] = "chat"
    """How messages become text: the tokenizer's chat template, or their contents joined. Control
    tokens spelled out in a message (`<|im_end|>`) are text."""
    trust_remote_code: bool = False
    """Run Python code shipped with the model. Enable only if you have read it."""


class CriticConfig(Section):
    """The critic that computes values for the advantage gae; it trains together with the policy."""

    model: ModelConfig | None = None
    """Its base model, to which a value head is added; not set: the policy's model."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Its optimizer; the schedule is the policy's."""
    loss: ValuePart = ValueLoss()
    """Its loss per token."""
    warmup_steps: NonNegative = 0
    """Steps at the start in which only the critic trains."""
    parallel: ParallelConfig | None = None
    """How its devices divide it; not set: as those of the policy with train.strategy=fsdp, else
    it has one device."""

    @property
    def peak_lr(self) -> float:
        return self.optimizer.lr or 1e-5


class TeacherConfig(ModelConfig):
    """The model to distil from; it must have the policy's vocabulary."""

    top_k: Positive = 32
    """Number of the teacher's most likely tokens that the loss distillation reads."""
    parallel: ParallelConfig | None = None
    """How its devices divide it; not set: as those of the policy with train.strategy=fsdp, else
    each device has a copy."""


class JudgeConfig(ModelConfig):
    """A frozen model for the reward `judge`, used if the reward has no url."""

    slots: Positive = 64
    """Verdicts that are generated together."""
    max_length: Positive = 4096
    """Longest prompt and verdict, in tokens."""


class RewardModelConfig(ModelConfig):
    """A frozen model for the reward `model`: one score for a prompt and its answer.

    A transformers model for sequence classification with one label.
    """

    batch_size: Positive = 64
    """Maximum samples that are scored together."""
    max_length: Positive = 4096
    """Longest prompt and answer, in tokens; scoring a longer one fails."""
    parallel: ParallelConfig | None = None
    """How its devices divide it; not set: as those of the policy with train.strategy=fsdp, else
    each device has a copy."""
