"""All training loops, in the order of the table in docs/torch.md."""

import loop
import loops_of_backward
import loops_of_models
import loops_of_steps

MODULES = (loops_of_steps, loops_of_backward, loops_of_models)
LOOPS = {n: each for m in MODULES for n, each in loop.LOOPS.items() if each.body.__module__ == m.__name__}
