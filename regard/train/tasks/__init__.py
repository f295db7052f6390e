"""Tasks: what is learned from which data. One file a task; `base.py` says what a task is and lists them."""

from regard.train.tasks.base import TASKS, Order, Task, task

__all__ = ["TASKS", "Order", "Task", "task"]
