"""What UCX is told of TCP before MPI starts."""

import pytest

from mpiflow.exec.launch import send_large_segments

LARGE = {"UCX_TCP_TX_SEG_SIZE": "64k", "UCX_TCP_RX_SEG_SIZE": "64k"}


@pytest.mark.parametrize("given", [{}, {"UCX_TLS": "all"}, {"UCX_TLS": "tcp,self"}])
def test_segments_are_large_where_mpi_may_talk_tcp(given):
    environment = dict(given)
    send_large_segments(environment)
    assert environment == given | LARGE


@pytest.mark.parametrize(
    "given", [{"UCX_TLS": "posix,self"}, {"UCX_TLS": "^tcp"}, {"UCX_NET_DEVICES": "mlx5_0:1"}]
)
def test_nothing_is_set_that_ucx_would_warn_of(given):
    environment = dict(given)
    send_large_segments(environment)
    assert environment == given


def test_what_the_user_has_set_stays():
    environment = {"UCX_TCP_TX_SEG_SIZE": "16k"}
    send_large_segments(environment)
    assert environment == LARGE | {"UCX_TCP_TX_SEG_SIZE": "16k"}
