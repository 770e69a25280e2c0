"""The schema of a recipe: every option with its type, default and meaning.

One module for each section. A recipe is frozen: nothing rewrites it after loading, and derived
values are properties. Checks that need several settings are in rollick.config.rules.
"""

from rollick.config.schema.algorithm import AlgorithmConfig as AlgorithmConfig
from rollick.config.schema.data import AgenticDomain as AgenticDomain
from rollick.config.schema.data import DataConfig as DataConfig
from rollick.config.schema.data import DistillDomain as DistillDomain
from rollick.config.schema.data import Domain as Domain
from rollick.config.schema.data import DpoDomain as DpoDomain
from rollick.config.schema.data import EnvironmentSpec as EnvironmentSpec
from rollick.config.schema.data import PromptSelectionConfig as PromptSelectionConfig
from rollick.config.schema.data import RetireConfig as RetireConfig
from rollick.config.schema.data import RewardSpec as RewardSpec
from rollick.config.schema.data import RlDataConfig as RlDataConfig
from rollick.config.schema.data import RlvrDomain as RlvrDomain
from rollick.config.schema.data import ScoredDomain as ScoredDomain
from rollick.config.schema.data import SftDomain as SftDomain
from rollick.config.schema.data import SummarySpec as SummarySpec
from rollick.config.schema.data import TrainingDomain as TrainingDomain
from rollick.config.schema.data import ValidationDomain as ValidationDomain
from rollick.config.schema.data import agent_of as agent_of
from rollick.config.schema.data import environment_of as environment_of
from rollick.config.schema.data import rewards_of as rewards_of
from rollick.config.schema.recipe import RECIPES as RECIPES
from rollick.config.schema.recipe import AgenticRecipe as AgenticRecipe
from rollick.config.schema.recipe import DistillRecipe as DistillRecipe
from rollick.config.schema.recipe import Recipe as Recipe
from rollick.config.schema.recipe import RlRecipe as RlRecipe
from rollick.config.schema.recipe import RlvrRecipe as RlvrRecipe
from rollick.config.schema.recipe import SftRecipe as SftRecipe
from rollick.config.schema.recipe import SupervisedRecipe as SupervisedRecipe
from rollick.config.schema.recipe import model_of as model_of
from rollick.config.schema.recipe import parse_recipe as parse_recipe
from rollick.config.schema.recipe import recipe_type as recipe_type
from rollick.config.schema.recipe import rl_recipe as rl_recipe
from rollick.config.schema.recipe import teacher_of as teacher_of
from rollick.config.schema.rollout import RolloutConfig as RolloutConfig
from rollick.config.schema.rollout import SamplingConfig as SamplingConfig
from rollick.config.schema.run import ClusterConfig as ClusterConfig
from rollick.config.schema.run import InferConfig as InferConfig
from rollick.config.schema.run import VllmConfig as VllmConfig
from rollick.config.schema.run import WeightsConfig as WeightsConfig
from rollick.config.schema.train import CriticConfig as CriticConfig
from rollick.config.schema.train import JudgeConfig as JudgeConfig
from rollick.config.schema.train import LoraConfig as LoraConfig
from rollick.config.schema.train import ModelConfig as ModelConfig
from rollick.config.schema.train import OptimizerConfig as OptimizerConfig
from rollick.config.schema.train import ParallelConfig as ParallelConfig
from rollick.config.schema.train import ScheduleConfig as ScheduleConfig
from rollick.config.schema.train import TeacherConfig as TeacherConfig
from rollick.config.schema.train import TrainConfig as TrainConfig
