"""Training: recipes, tasks, the loop, checkpoints and runs; and the experiments that are made of them."""

from regard.train import (  # they register what recipes name
    distil,
    heads,
    knowledge,
    knowledge_tasks,
    lm,
    repeats,
    sentiment,
    sentiment_task,
    summarize,
    summarize_task,
)
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
    "distil",
    "heads",
    "knowledge",
    "knowledge_tasks",
    "lm",
    "repeats",
    "resume",
    "sentiment",
    "sentiment_task",
    "summarize",
    "summarize_task",
    "task",
    "train",
]
