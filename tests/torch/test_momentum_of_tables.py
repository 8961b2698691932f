"""The default compressor's momentum, where the library is not told which parameters have sparse gradients."""

import pytest

torch = pytest.importorskip("torch")

from nets import close, parameters  # noqa: E402

from sparsecoll import simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer  # noqa: E402


class Tied(torch.nn.Module):
    """A table that is flagged as sparse, and whose gradient is dense."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(20, 3, sparse=True, dtype=torch.float64)

    def forward(self, words):
        return torch.nn.functional.linear(self.table(words), self.table.weight)


@pytest.mark.parametrize("with_closure", [False, True])
def test_rows_have_the_optimizers_momentum_without_a_module(with_closure):
    def program(comm, whole):
        torch.manual_seed(0)
        table = torch.nn.Embedding(20, 3, sparse=True, dtype=torch.float64)
        given = table if whole else [*table.named_parameters()]
        optimizer = DistributedOptimizer(torch.optim.SGD(table.parameters(), 0.1, 0.9), given, comm)

        def closure():
            optimizer.zero_grad()
            loss = table(torch.tensor([comm.rank, 5])).square().sum()
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(closure) if with_closure else (closure(), optimizer.step())
        return parameters(table)

    results = [simulate(2, lambda comm, whole=whole: program(comm, whole)).results for whole in (True, False)]
    for mine, theirs in zip(*results, strict=True):
        close(mine, theirs)


def test_a_flagged_table_with_a_dense_gradient_has_the_compressors_momentum_alone():
    def program(comm):
        torch.manual_seed(0)
        model = Tied()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9), model, comm, dense_below=0)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([comm.rank, 5])).square().sum().backward()
            optimizer.step()
        return [state.get("momentum_buffer") is None for state in optimizer.state.values()]

    assert all(all(found) for found in simulate(2, program).results)
