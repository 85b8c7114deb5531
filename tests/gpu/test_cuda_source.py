"""The CUDA source that mpiflow writes compiles, for the GPUs of 2020 and of 2022."""

import shutil
import subprocess

import pytest

from mpiflow.exec.cuda_arrays import PUT_ROWS, SUM_SORTED, TAKE

KERNEL = """
template <typename T, typename S>
__global__ void take(const T* source, const S* index, long long rows, long long width, T* to) {{
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    T out;
    {body}
    to[i] = out;
}}
template <typename T>
__global__ void sum_sorted(
    const T* values, const long long* keys, const long long* place, long long count,
    long long width, long long shift, long long held, T* out) {{
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    {sum_sorted}
}}
template <typename T>
__global__ void put_rows(
    const T* source, const long long* rows, long long width, long long held, T* out) {{
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    {put_rows}
}}
template __global__ void sum_sorted<float>(
    const float*, const long long*, const long long*, long long, long long, long long, long long,
    float*);
template __global__ void put_rows<double>(
    const double*, const long long*, long long, long long, double*);
template __global__ void take<float, long long>(
    const float*, const long long*, long long, long long, float*);
template __global__ void take<double, unsigned long long>(
    const double*, const unsigned long long*, long long, long long, double*);
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_kernels_that_mpiflow_writes_compile(tmp_path):
    file = tmp_path / "take.cu"
    file.write_text(KERNEL.format(body=TAKE, sum_sorted=SUM_SORTED, put_rows=PUT_ROWS))
    done = subprocess.run(
        ["nvcc", "-fatbin", "-Werror", "all-warnings", "-o", tmp_path / "take.fatbin",
         "-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=sm_90", file],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
