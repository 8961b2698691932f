"""Plays random training programs, see programs.py."""

from local_trainer import LocalTrainer
from programs import LOCAL, Plan, Trainer


def run(comm, seed):
    """Play a program on a rank."""
    plan = Plan(seed)
    try:
        trainer = LocalTrainer if plan.way == LOCAL else Trainer
        return trainer(comm, plan).play().values()
    except BaseException as error:
        error.add_note(f"program {seed} on {comm.size} ranks: {plan}")
        raise
