"""The CUDA source that mpiflow writes compiles, for the GPUs of 2020 and of 2022."""

import shutil
import subprocess

import pytest

from mpiflow.exec.cuda_arrays import TAKE

KERNEL = """
template <typename T, typename S>
__global__ void take(const T* source, const S* index, long long rows, long long width, T* to) {{
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    T out;
    {body}
    to[i] = out;
}}
template __global__ void take<float, long long>(
    const float*, const long long*, long long, long long, float*);
template __global__ void take<double, unsigned long long>(
    const double*, const unsigned long long*, long long, long long, double*);
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_rows_are_taken_by_source_that_compiles(tmp_path):
    file = tmp_path / "take.cu"
    file.write_text(KERNEL.format(body=TAKE))
    done = subprocess.run(
        ["nvcc", "-fatbin", "-Werror", "all-warnings", "-o", tmp_path / "take.fatbin",
         "-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=sm_90", file],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
