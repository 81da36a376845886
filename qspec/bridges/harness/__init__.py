"""lm-evaluation-harness: a task on one arm, through qspec's own engine, transformers on a folder, or a server.

Items keep the harness's hashes, so that two arms are compared item by item.
"""

from qspec.bridges.harness.models import evaluate, evaluate_folder, evaluate_served
from qspec.bridges.harness.scores import Sample, TaskScores
from qspec.bridges.harness.tasks import require

__all__ = ["Sample", "TaskScores", "evaluate", "evaluate_folder", "evaluate_served", "require"]
