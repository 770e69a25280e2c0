"""The run: its length and records, the engines, and where its processes run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rollick.config.schema.section import IgnoredWith, NonNegative, Positive, Seconds, Section


class RunConfig(Section):
    """Name, length, seed and threads of the run."""

    name: str = "run"
    """Name of the run's folder."""
    folder: str = "runs"
    """Parent of run folders; relative to the working directory."""
    steps: Positive = 100
    """Training steps."""
    max_minutes: Annotated[float, Field(ge=0)] = 0
    """The run ends after this time, with a checkpoint; 0 is no limit. It makes at least one step.
    It validates at its end unless it had to interrupt a step that took longer than the one
    before."""
    seed: NonNegative = 0
    """Seed of everything random in the run."""
    deterministic: bool = False
    """Bit-for-bit repeatable, on the CPU only: fixed row tiles, attention per sequence, ordered
    ids."""
    threads: NonNegative = 0
    """CPU threads of each worker process; 0: the machine's cores, or 1 if deterministic."""
    stuck_after_s: Seconds = 600
    """The run stops after this long without progress, and reports what it waits for. Generated
    tokens are progress; a call of an environment, an agent or a reward is never stuck before its
    own time limit (`environments`, `rewards.timeout_s`)."""
    stop_grace_s: Seconds = 600
    """After a signal: time to finish the step and save. Then the run exits immediately, with its
    last checkpoint."""


class CheckpointConfig(Section):
    """When checkpoints are saved, and which are kept."""

    every: NonNegative = 0
    """Steps between checkpoints; 0: only every_s decides. The end of a run and a signal always save
    one."""
    every_s: Annotated[float, Field(ge=0)] = 900
    """A checkpoint is also saved after the first step that ends this long after the last one, so
    that a crash loses no more; 0: only `every` decides."""
    keep_last: Positive = 2
    """Newest checkpoints kept."""
    keep_best: NonNegative = 1
    """Checkpoints with the best validation score that are also kept."""
    snapshot: bool = True
    """Copy the state of policy and critic into host memory after each step, so that the loss of
    their process does not end the run, and training does not wait for the disk. Needs twice the
    memory of the optimizer state. Only with cluster.backend=ray."""


class ObserveConfig(Section):
    """What is recorded and shown."""

    sinks: tuple[str, ...] = ("tensorboard",)
    """Destinations of metrics besides metrics.jsonl. A sink that fails is switched off, with a
    warning."""
    live: Literal["auto", "on", "off"] = "auto"
    """The live view; auto shows it on a terminal."""
    report: bool = True
    """Write report.html when the run ends: task, model, seed, results, curves and samples."""
    trace_mb: Annotated[float, Field(ge=0)] = 64
    """Megabytes of timelines of the newest samples for `rollick trace`; 0 keeps none. A sample
    takes about 300 bytes, and 200 for each further turn."""


class RlObserveConfig(ObserveConfig):
    """What is recorded and shown of a run that samples."""

    samples_per_step: NonNegative = 4
    """Samples written to samples.jsonl at each step."""
    dump_steps: tuple[NonNegative, ...] = ()
    """Steps whose groups and batch are dumped for `rollick replay`."""
    engine_steps: bool = False
    """Write engine_steps.jsonl for `rollick simulate --from`: engine steps, lengths, training
    times. At most about 200 kilobytes for each training step and engine."""


class VllmConfig(Section):
    """Options of the engine vllm. It also uses slots, max_length and prefill_tokens of infer."""

    tensor_parallel: Positive = 1
    """Devices per engine, starting with that of the generator."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Fraction of a GPU's memory for the engine, weights and cache together."""
    kv_cache_gb: Annotated[float, Field(ge=0)] = 0.0
    """Size of the KV cache in gigabytes; 0: the rest of gpu_memory_utilization, or 1 on the CPU."""
    enforce_eager: bool = False
    """Do not compile the model or capture graphs: starts faster, decodes slower."""


class InferConfig(Section):
    """The engines that generate."""

    engine: str = "native"
    """Which engine; see `rollick list`."""
    slots: Positive = 256
    """Sequences that one engine decodes together."""
    max_length: Positive = 2048
    """Longest sequence, with its prompt, in tokens."""
    prefill_tokens: Positive = 8192
    """Maximum prompt tokens of one engine step."""
    free_cache: bool = True
    """Free the KV cache and captured graphs of the native engine while the learner uses the same
    GPU; capturing graphs again takes seconds in each step. false keeps both, if there is
    room."""
    zero_mismatch: bool = False
    """On a GPU, engine and learner use the same kernels, so that their log-probs agree. Slower; on
    the CPU use run.deterministic."""
    vllm: Annotated[VllmConfig, IgnoredWith("engine", ("native",))] = VllmConfig()
    """Options of the engine vllm."""


class WeightsConfig(Section):
    """How new weights are sent from the learner to engines that do not share its memory."""

    channel: Literal["auto", "direct", "host", "cuda_ipc", "broadcast"] = "auto"
    """How weights are sent. auto: depends on where the processes run. direct: in one process. host:
    shared memory of one machine. cuda_ipc: the same on GPUs. broadcast: torch.distributed, between
    machines."""
    in_place: Annotated[bool, IgnoredWith("channel", ("direct", "host", "cuda_ipc"))] = False
    """Over broadcast, write new weights into the parameters of the engines, which generate nothing
    meanwhile. Needs no memory for a second copy; if a transfer fails, the engines wait for the next
    one. false: engines keep generating until all have received and verified the weights."""
    changes_only: Annotated[bool, IgnoredWith("channel", ("direct", "cuda_ipc"))] = False
    """Send only the elements that changed. Costs a copy of the weights at both ends; pays off where
    sending is slower than memory (broadcast) and steps are small."""


def _as_text(value: Any) -> Any:
    """`policy: 0` is short for `policy: "0"`."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


DeviceList = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | int)]


class DevicesConfig(Section):
    """The devices of each role: "0-3,6" for GPUs, "cpu" or "cpu:0-1" for CPU workers.

    Roles on one device share a process (colocation).
    """

    policy: DeviceList = "cpu"
    """The learner."""
    generators: DeviceList = "cpu"
    """The engines, one on each device."""
    reward_model: DeviceList | None = None
    """The reward model; not set: the first of the policy's devices."""
    judge: DeviceList | None = None
    """The judge; not set: the first of the policy's devices."""

    def of(self, role: str) -> str | None:
        """The devices that are set for a role."""
        return dict(self).get(role)


class DpoDevices(DevicesConfig):
    """The devices of each role of pipeline dpo."""

    reference: DeviceList | None = None
    """The frozen reference; not set: the policy's devices."""


class DistillDevices(DevicesConfig):
    """The devices of each role of pipeline distill."""

    teacher: DeviceList | None = None
    """The teacher; not set: the policy's devices."""


class RlDevices(DevicesConfig):
    """The devices of each role of an RL pipeline."""

    reference: DeviceList | None = None
    """The frozen reference, if something needs it; not set: the policy's devices."""
    critic: DeviceList | None = None
    """The critic, if an advantage needs it; not set: the policy's devices."""
    teacher: DeviceList | None = None
    """The teacher, if something needs it; not set: the policy's devices."""


class ClusterConfig(Section):
    """Where the worker processes run."""

    backend: Literal["ray", "inline"] = "ray"
    """ray: worker processes on a Ray cluster. inline: everything in this process."""
    address: Annotated[str | None, IgnoredWith("backend", ("inline",))] = None
    """Address of an existing Ray cluster; not set: a new one on this machine."""
    cpus_per_worker: Annotated[float, Field(ge=0)] = 0
    """CPUs that Ray reserves for each worker process."""
    place_timeout_s: Seconds = 60
    """The run fails if a worker is not placed within this time."""
    restarts: NonNegative = 3
    """Restarts of a lost role between two finished steps; then the run ends. Generators have
    rollout.engine_restarts."""
    spare_workers: Annotated[NonNegative, IgnoredWith("backend", ("inline",))] = 0
    """Processes that have imported their packages and replace lost CPU workers, seconds faster
    than a new one would. Each takes about 0.4 GB."""
    call_timeout_s: Seconds = 1800
    """Time limit of the first call of each kind to a worker. Later calls have ten times as long as
    the slowest of recent ones took, but never longer than this."""


class RewardsConfig(Section):
    """The processes that run rewards."""

    processes: Positive = 1
    """Number of processes."""
    timeout_s: Seconds = 30
    """A call that takes longer is killed; its sample is masked and counted."""


class EnvironmentsConfig(Section):
    """The processes that run environments and agents."""

    processes: Positive = 1
    """Number of processes; each holds many episodes."""
    threads: Positive = 1
    """Calls that a process runs concurrently, for environments that wait rather than compute."""
    step_timeout_s: Seconds = 60
    """A step that takes longer ends its process; its sample is masked."""
    episode_timeout_s: Seconds = 3600
    """The same limit for all steps of an episode together, without generation."""
