"""Training: recipes, tasks, the loop, checkpoints and runs; and the experiments that are made of them."""

from regard.train import knowledge, knowledge_tasks, lm  # they register what recipes name
from regard.train.loop import Interrupted, Trainer, TrainingError
from regard.train.recipe import Recipe
from regard.train.run import Run, RunError
from regard.train.settings import TrainConfig
from regard.train.stage import resume, train
from regard.train.task import Task, task

__all__ = [
    "Interrupted",
    "Recipe",
    "Run",
    "RunError",
    "Task",
    "TrainConfig",
    "Trainer",
    "TrainingError",
    "knowledge",
    "knowledge_tasks",
    "lm",
    "resume",
    "task",
    "train",
]
