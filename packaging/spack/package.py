# The recipe for spack/spack-packages; packaging/RELEASING.md says what is added there.

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PySparsecoll(PythonPackage):
    """MPI-native sparse collectives: allreduce of top-k gradients and other long sparse vectors."""

    pypi = "sparsecoll/sparsecoll-0.1.0.tar.gz"

    license("Apache-2.0")

    version("0.1.0")

    variant("mpi", default=True, description="Ranks of MPI")
    variant("torch", default=False, description="Training with PyTorch, and process groups in the place of MPI")
    variant("plot", default=False, description="Figures of the command sparsecoll plot")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-numba@0.60:0.68", type=("build", "run"))
    depends_on("py-mpi4py@4:", when="+mpi", type=("build", "run"))
    depends_on("py-torch@2.7:", when="+torch", type=("build", "run"))
    depends_on("py-matplotlib", when="+plot", type=("build", "run"))
