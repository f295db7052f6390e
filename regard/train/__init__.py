"""Training: recipes, tasks, the loop, checkpoints and runs."""

from regard.errors import Interrupted, RunError
from regard.train.loop import Trainer, TrainingError
from regard.train.recipe import Recipe
from regard.train.run import Run
from regard.train.settings import TrainConfig
from regard.train.stage import resume, train
from regard.train.tasks import Task, task

__all__ = [
    "Interrupted",
    "Recipe",
    "Run",
    "RunError",
    "Task",
    "TrainConfig",
    "Trainer",
    "TrainingError",
    "resume",
    "task",
    "train",
]
